"""Random steps of speculation, and checks of the kernels of a verify step against their plain twins on any device.

Shape letters as in engine/verify.py.
"""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass, fields, replace

import torch

from engine import verify as twin
from engine.kernels.gpu import verify
from engine.kernels.verify_rows import VerifyRows
from engine.sampling import SamplingRows
from tests.small_kernels import poisoned

VOCAB = 3  # few tokens, so that guesses are often right


@dataclass
class VerifyCase:
    """tokens_M: what the target draws at every row."""

    requests: twin.StepRequests
    state: twin.CommittedTokens
    sampling_N: SamplingRows
    tokens_M: torch.Tensor
    width: int
    block_size: int


def verify_case(
    seed: int,
    count: int | None = None,
    width: int | None = None,
    guesses: int | None = None,
    device: str = "cpu",
    blocks: int = 3,
    block_size: int = 16,
) -> VerifyCase:
    """A third of the requests each: padding, known to the host, pending. Positions pass limits, and both the table."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count, width = count or rng.randint(1, 9), width or rng.randint(1, 6)
    guesses = rng.randint(width - 1, 15) if guesses is None else guesses
    state_rows, room = count + 2, guesses + 1

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    def real() -> torch.Tensor:
        return torch.rand(count, generator=generator)

    end = blocks * block_size
    kinds_N = integers(0, 3, count)
    starts_N = torch.where(integers(0, 2, count) > 0, integers(0, end, count), end - 1 - integers(0, 4, count))
    limits_N = (starts_N + 1 + integers(0, 2 * width, count)).clamp(max=end + 3)
    table_NB = integers(1, 2**40, count + 1, blocks + 2)[:count, :blocks]
    requests = twin.StepRequests(
        integers(0, VOCAB, count),
        apart(starts_N),
        integers(-1, VOCAB, count, guesses),
        torch.where(kinds_N == 2, integers(0, state_rows, count), -1).int(),
        apart(torch.where(kinds_N == 0, 0, limits_N)),
        table_NB,
    )
    state = twin.CommittedTokens(
        integers(0, VOCAB, state_rows, room),
        integers(0, min(room, width), state_rows, dtype=torch.int32),
        integers(0, room, state_rows, dtype=torch.int32),
        integers(-1, VOCAB, state_rows, guesses),
    )
    seeds_N = integers(-(2**62), 2**62, count)
    top_k_N = integers(0, 50, count, dtype=torch.int32)
    sampling_N = SamplingRows(real(), top_k_N, real(), real().log(), seeds_N, integers(0, 9, count))
    case = VerifyCase(requests, state, sampling_N, integers(0, VOCAB, count * width), width, block_size)
    return case if device == "cpu" else moved(case, device)


def apart(values_N: torch.Tensor) -> torch.Tensor:
    """The same as a column of a wider tensor."""
    return torch.stack((values_N, values_N - 10**9, values_N + 10**9), dim=1)[:, 0]


def moved(case: VerifyCase, device: str) -> VerifyCase:
    """The same on another device; the table still a part of a wider one."""
    table_NB = torch.nn.functional.pad(case.requests.table_NB, (0, 2), value=-1).to(device)
    requests = twin.StepRequests(*(value.to(device) for value in case.requests))
    return replace(
        case,
        requests=requests._replace(
            table_NB=table_NB[:, : case.requests.table_NB.shape[1]],
            starts_N=apart(requests.starts_N),
            limits_N=apart(requests.limits_N),
        ),
        state=twin.CommittedTokens(*(value.to(device) for value in astuple(case.state))),
        sampling_N=SamplingRows(*(value.to(device) for value in astuple(case.sampling_N))),
        tokens_M=case.tokens_M.to(device),
    )


def copied(state: twin.CommittedTokens) -> twin.CommittedTokens:
    return twin.CommittedTokens(*(value.clone() for value in astuple(state)))


def whole_step(operations, case: VerifyCase, state: twin.CommittedTokens) -> dict[str, torch.Tensor]:
    """Everything that a step leaves, by name; `operations`: this module's twin or its kernels."""
    requests = case.requests
    rows = operations.verify_rows(requests, state, case.sampling_N, case.width, case.block_size)
    accepted = operations.accept(case.tokens_M, rows, state)
    place = (accepted.positions_N, accepted.seq_lens_N)
    results = rows._asdict() | accepted._asdict() | {f"state {f.name}": getattr(state, f.name) for f in fields(state)}
    results |= {f"sampling {name}": getattr(results["sampling"], name) for name in SamplingRows.NAMES}
    assert type(rows) is VerifyRows and type(results.pop("sampling")) is SamplingRows
    for step in range(2):
        *place, slots_N = operations.next_place(*place, requests.table_NB, requests.limits_N, case.block_size)
        results |= {f"position after {step}": place[0], f"length after {step}": place[1], f"slot {step}": slots_N}
    return results


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def check_step(case: VerifyCase) -> dict[str, torch.Tensor]:
    """Kernels and twin leave the same, bit for bit. Returns it."""
    expected = whole_step(twin, case, copied(case.state))
    with poisoned():
        found = whole_step(verify, case, copied(case.state))
    assert_same(found, expected)
    return expected
