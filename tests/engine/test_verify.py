"""A verify step's bookkeeping against slow Python that looks at one request at a time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from engine import verify
from engine.sampling import SamplingRows
from engine.verify import NO_GUESS, CommittedTokens, StepRequests

VOCAB = 3  # so small that chance guesses are often right


@dataclass
class One:
    """A request of a step; `source` names the row of the state that takes the place of what the host says."""

    start: int
    token: int
    guesses: list[int]
    source: int
    blocks: list[int]
    limit: int
    temperature: float
    seed: int

    @property
    def is_padding(self) -> bool:
        return self.limit == 0


@dataclass
class Left:
    """A row of the state."""

    tokens: list[int]
    accepted: int
    guesses: list[int]


@dataclass
class Case:
    width: int
    columns: int
    size: int
    left: list[Left]
    requests: list[One]
    tokens: list[list[int]] = field(default_factory=list)

    @classmethod
    def draw(cls, rng: random.Random) -> Case:
        columns, size, num_blocks = rng.randint(1, 5), rng.choice([1, 2, 4, 8]), rng.randint(1, 6)
        width = rng.randint(1, columns + 1)
        num_rows, count = rng.randint(1, 7), rng.randint(1, 7)

        def guesses() -> list[int]:
            kept = rng.choice([columns, rng.randint(0, columns)])
            return [rng.randrange(VOCAB) for _ in range(kept)] + [NO_GUESS] * (columns - kept)

        def row() -> Left:
            return Left([rng.randrange(VOCAB) for _ in range(columns + 1)], rng.randint(0, columns), guesses())

        def one() -> One:
            limit = rng.choice([0, rng.randint(1, num_blocks) * size])
            return One(
                start=rng.randrange(max(limit, 1)),
                token=rng.randrange(VOCAB),
                guesses=guesses(),
                source=rng.randrange(-1, max(num_rows, count)) if limit else -1,
                blocks=[rng.randrange(100) for _ in range(num_blocks)],
                limit=limit,
                temperature=rng.choice([0.0, 0.7]),
                seed=rng.getrandbits(40),
            )

        found = cls(width, columns, size, [row() for _ in range(max(num_rows, count))], [one() for _ in range(count)])
        found.tokens = [[rng.randrange(VOCAB) for _ in range(width)] for _ in range(count)]
        return found

    def state(self) -> CommittedTokens:
        return CommittedTokens(
            torch.tensor([row.tokens for row in self.left]),
            torch.tensor([row.accepted for row in self.left], dtype=torch.int32),
            torch.full((len(self.left),), -7, dtype=torch.int32),
            torch.tensor([row.guesses for row in self.left]),
        )

    def inputs(self) -> tuple[StepRequests, SamplingRows]:
        some = self.requests
        count = len(some)
        requests = StepRequests(
            torch.tensor([r.token for r in some]),
            torch.tensor([r.start for r in some]),
            torch.tensor([r.guesses for r in some]),
            torch.tensor([r.source for r in some], dtype=torch.int32),
            torch.tensor([r.limit for r in some]),
            torch.tensor([r.blocks for r in some]),
        )
        sampling = SamplingRows(
            torch.tensor([r.temperature for r in some]),
            torch.arange(count, dtype=torch.int32),
            torch.rand(count),
            -torch.rand(count),
            torch.tensor([r.seed for r in some]),
            torch.full((count,), -99),
        )
        return requests, sampling

    def now(self, one: One) -> tuple[int, int, list[int]]:
        """The request's last token, its position, and the guesses that have a slot."""
        token, start, guesses = one.token, one.start, one.guesses
        if one.source >= 0:
            row = self.left[one.source]
            token, start, guesses = row.tokens[row.accepted], one.start + row.accepted, row.guesses
        fitting = [g if start + 1 + i < one.limit else NO_GUESS for i, g in enumerate(guesses)]
        return token, start, fitting

    def slot(self, one: One, position: int) -> int:
        number = one.blocks[position // self.size] if position < one.limit else 0
        return number * self.size + position % self.size


def cases() -> list[Case]:
    return [Case.draw(random.Random(seed)) for seed in range(300)]


def rows_of(case: Case):
    requests, sampling = case.inputs()
    return verify.verify_rows(requests, case.state(), sampling, case.width, case.size), sampling


def test_rows_of_any_step():
    for case in cases():
        rows, sampling = rows_of(case)
        ids, positions, slots = (t.view(-1, case.width).tolist() for t in rows[:3])
        for n, one in enumerate(case.requests):
            token, start, guesses = case.now(one)
            if one.is_padding:
                zeros = [0] * case.width
                assert ids[n] == positions[n] == zeros and slots[n] == zeros
                assert rows.seq_lens_N[n] == 0 and rows.starts_N[n] == 0
            else:
                assert ids[n] == [token, *(max(g, 0) for g in guesses[: case.width - 1])]
                assert positions[n] == list(range(start, start + case.width))
                assert slots[n] == [case.slot(one, p) for p in positions[n]]
                assert rows.seq_lens_N[n] == start + case.width and rows.starts_N[n] == start
            assert rows.guesses_NK[n].tolist() == guesses
        assert rows.seq_lens_N.dtype == torch.int32 and rows.token_ids_M.dtype == rows.slots_M.dtype == torch.int64
        check_sampling(case, rows.sampling, sampling, positions)


def check_sampling(case: Case, found: SamplingRows, given: SamplingRows, positions: list[list[int]]) -> None:
    """Every row draws as its request does, at its own place; padding is greedy."""
    for n, one in enumerate(case.requests):
        mine = slice(n * case.width, (n + 1) * case.width)
        for name in ("top_k", "top_p", "log_min_p", "seeds"):
            assert getattr(found, name)[mine].tolist() == [getattr(given, name)[n].item()] * case.width
        expected = torch.tensor(0.0 if one.is_padding else one.temperature)
        assert (found.temperature[mine] == expected).all()
        assert found.places[mine].tolist() == [p + 1 for p in positions[n]]


def test_what_any_step_accepts():
    """As many guesses as were drawn in a row; one that was not verified is compared, and no more."""
    seen = set()
    for case in cases():
        rows, _ = rows_of(case)
        state, before = case.state(), case.state()
        accepted = verify.accept(torch.tensor(case.tokens).flatten(), rows, state)
        for n, one in enumerate(case.requests):
            _, start, guesses = case.now(one)
            start = 0 if one.is_padding else start
            matched = 0
            while matched < min(case.width, case.columns) and guesses[matched] == case.tokens[n][matched]:
                matched += 1
            taken = min(matched, case.width - 1)
            seen.add((case.width, taken, matched))
            assert state.accepted_S[n] == taken and state.matched_S[n] == matched
            assert state.tokens_SW[n, : case.width].tolist() == case.tokens[n]
            assert accepted.last_N[n] == n * case.width + taken
            assert accepted.positions_N[n] == start + taken
            assert accepted.seq_lens_N[n] == (0 if one.is_padding else start + taken + 1)
        assert accepted.seq_lens_N.dtype == torch.int32
        assert (state.guesses_SK[: len(case.requests)] == NO_GUESS).all(), "used up; the draft makes new ones"
        for mine, theirs in zip(state.tensors, before.tensors, strict=True):
            assert torch.equal(mine[len(case.requests) :], theirs[len(case.requests) :])
    assert {(3, 2, 2), (3, 0, 0), (1, 0, 1), (2, 1, 2)} <= seen, "all kinds came up"


def test_the_place_after_any_place():
    for case in cases():
        requests, _ = case.inputs()
        real = [not one.is_padding for one in case.requests]
        positions = torch.tensor([one.start if r else 0 for one, r in zip(case.requests, real, strict=True)])
        seq_lens = torch.tensor([p + 1 if r else 0 for p, r in zip(positions.tolist(), real, strict=True)]).int()
        found = verify.next_place(positions, seq_lens, requests.table_NB, requests.limits_N, case.size)
        for n, one in enumerate(case.requests):
            expected = one.start + 1 if real[n] else 0
            assert found[0][n] == expected and found[1][n] == (one.start + 2 if real[n] else 0)
            assert found[2][n] == case.slot(one, expected)
        assert found[1].dtype == torch.int32 and found[0].dtype == found[2].dtype == torch.int64


@pytest.mark.parametrize("num_guesses", [0, 3])
def test_an_empty_state_holds_no_guess(num_guesses):
    state = CommittedTokens.empty(2, num_guesses, torch.device("cpu"))
    assert state.tokens_SW.shape == (2, num_guesses + 1) and state.guesses_SK.shape == (2, num_guesses)
    assert (state.guesses_SK == NO_GUESS).all() and not state.accepted_S.any()
    first = state.rows(1)
    first.accepted_S[0] = 1
    assert state.accepted_S.tolist() == [1, 0], "in place"
