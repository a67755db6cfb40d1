"""Counts communication where the calls are made: rounds, bytes and, where a clock can tell, seconds by kind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

ATTENTION_REDUCE = "attention_reduce"
MOE_DISPATCH = "moe_dispatch"
MOE_COMBINE = "moe_combine"
MOE_ALL_REDUCE = "moe_all_reduce"
OTHER = "other"
KINDS = (ATTENTION_REDUCE, MOE_DISPATCH, MOE_COMBINE, MOE_ALL_REDUCE, OTHER)
VERBS = {
    ATTENTION_REDUCE: "reduce",
    MOE_DISPATCH: "dispatch",
    MOE_COMBINE: "combine",
    MOE_ALL_REDUCE: "combine",
}
"""Kind -> the verb of a dispatcher that is counted as such."""

_MOST_PART_CALLS = 2**20


@dataclass
class CommMeter:
    """Rounds and bytes sent by this rank, by kind. A verb of the dispatcher is one round, however it is carried out.

    seconds has the kinds alone that were timed: collectives that the host waits for are, within `clock`.
    calls: collectives entered, counted before they may wait for another rank; those of a part of the ranks apart.
    """

    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    seconds: dict[str, float] = field(default_factory=dict)
    _uncounted_seconds: float = 0.0
    _counted_as: str | None = None
    calls: int = 0
    _part_calls: tuple[int, int] = (0, 0)

    @property
    def position(self) -> float:
        """Grows with every collective entered and every round done; equal on ranks that have come equally far. Those of
        a part of the ranks, of which other parts may have more or less, are fractions between two of all ranks."""
        since, count = self._part_calls
        return self.calls + sum(self.rounds.values()) + (count / _MOST_PART_CALLS if since == self.calls else 0)

    def enter_part(self) -> None:
        """Counts a collective of a part of the ranks."""
        since, count = self._part_calls
        self._part_calls = self.calls, min(count + 1, _MOST_PART_CALLS - 1) if since == self.calls else 1

    def count(self, kind: str, num_bytes: int, rounds: int = 1) -> None:
        """The time spent within `clock` since the count before is this kind's."""
        kind = self._counted_as or kind
        self.rounds[kind] += rounds
        self.bytes[kind] += num_bytes
        if self._uncounted_seconds:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + self._uncounted_seconds
            self._uncounted_seconds = 0.0

    @contextmanager
    def all_as(self, kind: str) -> Iterator[None]:
        """Counts everything within it as of this kind."""
        before, self._counted_as = self._counted_as, kind
        try:
            yield
        finally:
            self._counted_as = before

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Times a collective that is counted next; one within another counts once."""
        before, started = self._uncounted_seconds, time.perf_counter()
        yield
        self._uncounted_seconds = before + time.perf_counter() - started

    def add(self, other: CommMeter) -> None:
        for kind in KINDS:
            self.rounds[kind] += other.rounds[kind]
            self.bytes[kind] += other.bytes[kind]
        for kind, seconds in other.seconds.items():
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def estimate(self, round_seconds: Mapping[str, float]) -> None:
        """Sets the seconds of what was counted from those of one round of each kind; 0 is as good as not measured."""
        self.seconds = {k: self.rounds[k] * s for k, s in round_seconds.items() if self.rounds[k] and s}

    @contextmanager
    def apart(self) -> Iterator[CommMeter]:
        """Counts what happens within it on a meter of its own instead: what a capture would send, but has not."""
        mine, apart = vars(self).copy(), CommMeter()
        vars(self).update(vars(apart))
        try:
            yield apart
        finally:
            vars(self).update(mine)

    def clear(self) -> None:
        """Forgets everything: what was sent while an engine was being prepared is no step's."""
        vars(self).update(vars(CommMeter()))
