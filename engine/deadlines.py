"""When answers have waited or run too long, by rank 0's clock. Asking costs nothing while none has: no scan."""

from __future__ import annotations

from collections import OrderedDict

from engine.request import QUEUE_TIMEOUT, REQUEST_TIMEOUT


class Deadlines:
    """`queue_timeout` bounds the seconds until a sequence begins, `request_timeout` those until it ends; None: no
    bound.

    Sequences are added in the order of their arrival and one limit holds for all, so the first of each queue is the
    next one due.
    """

    def __init__(self, queue_timeout: float | None = None, request_timeout: float | None = None):
        self._limits = {QUEUE_TIMEOUT: queue_timeout, REQUEST_TIMEOUT: request_timeout}
        self._due: dict[str, OrderedDict[str, float]] = {
            reason: OrderedDict() for reason, limit in self._limits.items() if limit is not None
        }

    def add(self, sequence_id: str, arrival: float) -> None:
        for reason, due in self._due.items():
            due[sequence_id] = arrival + self._limits[reason]

    def begin(self, sequence_id: str) -> None:
        if QUEUE_TIMEOUT in self._due:
            self._due[QUEUE_TIMEOUT].pop(sequence_id, None)

    def end(self, sequence_id: str) -> None:
        for due in self._due.values():
            due.pop(sequence_id, None)

    def take_due(self, now: float) -> list[tuple[str, str]]:
        """(sequence id, which timeout) of those past their time, which are forgotten with it."""
        found = []
        for reason, due in self._due.items():
            while due and (first := next(iter(due.items())))[1] <= now:
                found.append((first[0], reason))
                self.end(first[0])
        return found
