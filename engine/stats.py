"""What an engine has done so far, in numbers: counts that only grow, and plain snapshots that any thread may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.acceptance import GuessOutcome

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
QUEUE_BOUNDS = (0.001, 0.005, *FIRST_TOKEN_BOUNDS)
STEP_TOKEN_BOUNDS = tuple(float(2**i) for i in range(15))
END_TO_END_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True)
class Distribution:
    """counts[i] values lie above bounds[i - 1] and are at most bounds[i]; the last count is of those above all bounds.

    `total` is the sum of the values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values between fixed bounds."""

    def __init__(self, bounds: Iterable[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


@dataclass
class AnswerStats:
    """What became of answers; a request with n > 1 has n of them. Aborted ones have no end-to-end time.

    queue_time: from arrival to the first step, prefill_time: from there to the first token, decode_time: from there to
    the last one."""

    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS))
    prefill_time: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    decode_time: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS))

    def finish(self, reason: str, seconds: float | None = None) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        if seconds is not None:
            self.e2e_latency.observe(seconds)


@dataclass(frozen=True)
class DraftChoiceStats:
    """How many guesses the last step of a bucket verified; why: a short code, and a sentence for people."""

    num_drafts: int
    code: str
    reason: str


@dataclass(frozen=True)
class SpeculationSnapshot:
    """Counts of guesses. num_drafts: chains verified, one for each request that had guesses in a verify step.

    num_draft_tokens: guesses verified, num_accepted_tokens: of them. num_proposed_tokens: guesses made, those never
    verified with them. num_accepted_by_position[i]: guesses accepted at place i of a chain. accept_length: tokens that
    a chain's step committed, its own token included. choices by bucket; step_seconds by bucket and number of guesses.
    """

    num_verify_steps: int
    num_drafts: int
    num_proposed_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_by_position: tuple[int, ...]
    accept_length: Distribution
    choices: Mapping[int, DraftChoiceStats] = field(default_factory=dict)
    step_seconds: Mapping[int, Mapping[int, float]] = field(default_factory=dict)


class SpeculationStats:
    """Counts what became of guesses; at most `num_draft_tokens` in a chain."""

    def __init__(self, num_draft_tokens: int):
        self._num_verify_steps = self._num_proposed = self._num_verified = 0
        self._num_chains = [0] * (num_draft_tokens + 1)  # by guesses accepted

    def observe(self, num_requests: int, num_verify: int, num_propose: int, outcomes: Iterable[GuessOutcome]) -> None:
        """A decode step of so many requests; outcomes of those that were live when it was read."""
        self._num_proposed += num_requests * num_propose
        if not num_verify:
            return
        self._num_verify_steps += 1
        for outcome in outcomes:
            if outcome.verified:
                self._num_verified += outcome.verified
                self._num_chains[outcome.accepted] += 1

    def snapshot(
        self,
        choices: Mapping[int, DraftChoiceStats] | None = None,
        step_seconds: Mapping[int, Mapping[int, float]] | None = None,
    ) -> SpeculationSnapshot:
        chains = tuple(self._num_chains)
        accepted = sum(count * length for length, count in enumerate(chains))
        lengths = Distribution(tuple(map(float, range(1, len(chains) + 1))), (*chains, 0), accepted + sum(chains))
        return SpeculationSnapshot(
            num_verify_steps=self._num_verify_steps,
            num_drafts=sum(chains),
            num_proposed_tokens=self._num_proposed,
            num_draft_tokens=self._num_verified,
            num_accepted_tokens=accepted,
            num_accepted_by_position=tuple(sum(chains[i:]) for i in range(1, len(chains))),
            accept_length=lengths,
            choices=dict(choices or {}),
            step_seconds=dict(step_seconds or {}),
        )


class StepBudgetSnapshot(NamedTuple):
    """Prompt tokens that the next step may prefill beside requests that decode, None where no bound holds; the seconds
    that were expected of the last such step planned, and those that the last one read took."""

    limit_tokens: int | None
    predicted_seconds: float
    observed_seconds: float


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts run from the start; usage is the share of KV blocks in use, 0 to 1.

    kv_cache_blocks: blocks that are "free", "cached" (no request holds them, but one may find them) and "held", which
    are all there are. num_query_tokens: prompt tokens looked for in the prefix cache, num_hit_tokens: those found.
    step_tokens: rows of a step, guesses included.
    num_host_blocks: cold blocks on the host of a rank; num_restored_blocks: those brought back so far.
    num_steps: steps of the model. num_finished: answers by reason. comm_*: what rank 0 sent, by the kinds of
    engine.comm.meter; comm_seconds has the kinds alone that were timed. comm_choice: as
    `DispatcherChoice.report` gives it. speculation: None without a draft. step_budget: None without a bound on steps.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    kv_cache_blocks: Mapping[str, int]
    num_query_tokens: int
    num_hit_tokens: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: Mapping[str, int]
    time_to_first_token: Distribution
    inter_token_latency: Distribution
    e2e_latency: Distribution
    queue_time: Distribution
    prefill_time: Distribution
    decode_time: Distribution
    comm_rounds: Mapping[str, int]
    comm_bytes: Mapping[str, int]
    comm_seconds: Mapping[str, float]
    comm_choice: Mapping[str, Mapping]
    speculation: SpeculationSnapshot | None = None
    step_budget: StepBudgetSnapshot | None = None
    num_host_blocks: int = 0
    num_restored_blocks: int = 0
    step_tokens: Distribution = field(default_factory=lambda: Histogram(STEP_TOKEN_BOUNDS).snapshot())
