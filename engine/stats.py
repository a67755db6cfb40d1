"""What an engine has done so far, in numbers: counts that only grow, and plain snapshots that any thread may read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FINISH_REASONS = ("stop", "length", "abort")
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
END_TO_END_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True)
class Distribution:
    """counts[i] values lie above bounds[i - 1] and are at most bounds[i]; the last count is of those above all bounds.

    `total` is the sum of the values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts seconds between fixed bounds."""

    def __init__(self, bounds: Iterable[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


@dataclass
class AnswerStats:
    """What became of answers; a request with n > 1 has n of them. Aborted ones have no end-to-end time."""

    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_BOUNDS))
    e2e_latency: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BOUNDS))

    def finish(self, reason: str, seconds: float | None = None) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        if seconds is not None:
            self.e2e_latency.observe(seconds)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts run from the start; usage is the share of KV blocks in use, 0 to 1.

    num_steps: steps of the model. num_finished: answers by reason. comm_*: what rank 0 sent, by the kinds of
    engine.comm.meter; comm_seconds has the kinds alone that were timed. comm_choice: as
    `DispatcherChoice.report` gives it.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_finished: Mapping[str, int]
    time_to_first_token: Distribution
    inter_token_latency: Distribution
    e2e_latency: Distribution
    comm_rounds: Mapping[str, int]
    comm_bytes: Mapping[str, int]
    comm_seconds: Mapping[str, float]
    comm_choice: Mapping[str, Mapping]
