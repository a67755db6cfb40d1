"""Counts communication where the calls are made: rounds and bytes by kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ATTENTION_REDUCE = "attention_reduce"
MOE_DISPATCH = "moe_dispatch"
MOE_COMBINE = "moe_combine"
MOE_ALL_REDUCE = "moe_all_reduce"
OTHER = "other"
KINDS = (ATTENTION_REDUCE, MOE_DISPATCH, MOE_COMBINE, MOE_ALL_REDUCE, OTHER)


@dataclass
class CommMeter:
    """Rounds and bytes sent by this rank, by kind. A verb of the dispatcher is one round, however it is carried out."""

    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def count(self, kind: str, num_bytes: int, rounds: int = 1) -> None:
        self.rounds[kind] += rounds
        self.bytes[kind] += num_bytes

    def add(self, other: CommMeter, times: int = 1) -> None:
        for kind in KINDS:
            self.count(kind, times * other.bytes[kind], times * other.rounds[kind])

    @contextmanager
    def apart(self) -> Iterator[CommMeter]:
        """Counts what happens within it on a meter of its own instead: what a capture would send, but has not."""
        before, apart = CommMeter(), CommMeter()
        before.add(self)
        yield apart
        apart.add(self)
        apart.add(before, -1)
        self.add(apart, -1)
