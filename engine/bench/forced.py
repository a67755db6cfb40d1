"""A verify step whose accept lengths are given instead of found, so that speed can be measured without trained weights.

Everything is computed as in service; only the number of guesses that count as accepted is replaced, on the device.

Shape letters: N requests, M rows, P places of the pattern.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.verify_rows import NO_GUESS, Accepted, VerifyRows
from engine.model_runner import ModelRunner

_PLACES = 4096
_GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly over 0 to 1, any run of them


def acceptance_for(accept_length: float, num_guesses: int) -> float:
    """The chance a with which each next guess is accepted, so that 1 + a + a^2 + ... (num_guesses powers) is the accept
    length. Raises ValueError for a length that so many guesses cannot have."""
    if not 1.0 <= accept_length <= num_guesses + 1:
        raise ValueError(f"{num_guesses} guesses give accept lengths from 1 to {num_guesses + 1}, not {accept_length}.")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if expected_length(middle, num_guesses) > accept_length else (middle, high)
    return (low + high) / 2


def expected_length(acceptance: float, num_guesses: int) -> float:
    return sum(acceptance**i for i in range(num_guesses + 1))


class ForcedAcceptance:
    """`verify_ops` of a SampledStep: those given, `found`, with `accepted` from a pattern. `set` may change it under
    graphs.

    Requests and steps take places of the pattern in turn, and any run of places has about the mean that was asked for,
    as has any smaller number of guesses the mean that follows from it."""

    def __init__(self, verify_ops: Any, num_guesses: int, device: torch.device):
        self.found, self._num_guesses = verify_ops, num_guesses
        self.verify_rows, self.next_place = verify_ops.verify_rows, verify_ops.next_place
        self._pattern_P = torch.zeros(_PLACES, dtype=torch.int64, device=device)
        self._place_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.set(1.0)

    def set(self, accept_length: float) -> None:
        chance = acceptance_for(accept_length, self._num_guesses)
        fractions = (torch.arange(_PLACES, dtype=torch.float64) * _GOLDEN) % 1.0
        reached = [(fractions < chance**i).long() for i in range(1, self._num_guesses + 1)]
        self._pattern_P.copy_(torch.stack(reached).sum(0))

    def accept(self, tokens_M: torch.Tensor, rows: VerifyRows, state: Any) -> Accepted:
        """One launch more on a GPU than what it replaces."""
        found = self.found.accept(tokens_M, rows, state)
        width = tokens_M.shape[0] // found.last_N.shape[0]
        force = _force_plainly if tokens_M.device.type == "cpu" else _force_on_gpu
        force(self._pattern_P, self._place_1, rows, state, found, width)
        return found


def _force_plainly(
    pattern_P: torch.Tensor, place_1: torch.Tensor, rows: VerifyRows, state: Any, found: Accepted, width: int
) -> None:
    count = found.last_N.shape[0]
    there_N = (rows.guesses_NK[:, :width] != NO_GUESS).long().cumprod(dim=1).sum(dim=1)
    drawn_N = torch.minimum(pattern_P[(place_1 + torch.arange(count)) % _PLACES], there_N)
    place_1 += count
    accepted_N = drawn_N.clamp(max=width - 1)
    state.accepted_S[:count], state.matched_S[:count] = accepted_N, drawn_N
    found.last_N.copy_(torch.arange(count) * width + accepted_N)
    found.positions_N.copy_(rows.starts_N + accepted_N)
    found.seq_lens_N.copy_(torch.where(found.seq_lens_N > 0, found.positions_N + 1, 0))


def _force_on_gpu(
    pattern_P: torch.Tensor, place_1: torch.Tensor, rows: VerifyRows, state: Any, found: Accepted, width: int
) -> None:
    from engine.bench.forced_kernel import force

    force(pattern_P, place_1, rows, state, found, width)


class ForcedRunner(ModelRunner):
    """A runner whose accept lengths are `forced`."""

    forced: ForcedAcceptance

    def _operations(self) -> tuple[Any, Any]:
        sample_ops, verify_ops = super()._operations()
        self.forced = ForcedAcceptance(verify_ops, self.num_guesses, self.parallel.device)
        return sample_ops, self.forced
