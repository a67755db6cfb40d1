"""How many answers wait for their first step, how many may, and when it is worth coming back.

An answer waits from the moment its request enters until its first step. Those for whom a seat in the steps is free do
not count against the limit: they are about to begin. The owner of a `WaitingLine` holds its own lock around every call,
so that no two requests take the same last place.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from engine.server.errors import ApiError, bad_request

REMEMBERED_BEGINS = 64
LEAST_SECONDS = 1.0  # of observation that a rate rests on
MOST_SECONDS = 600


class WaitingLine:
    """`limit` is the most answers that may wait for one of `num_seats`, None for no limit."""

    def __init__(self, limit: int | None = None, num_seats: int = 0, clock: Callable[[], float] = time.monotonic):
        self.limit = limit
        self._num_seats = self._num_free = num_seats
        self.num_refused = 0  # calls, with 429
        self._clock = clock
        self._entering = self._in_core = self._num_begun = 0
        # Seconds for which somebody waited before some answers began, and how many did.
        self._begins: deque[tuple[float, int]] = deque(maxlen=REMEMBERED_BEGINS)
        self._since: float | None = None  # nobody has begun since, though somebody waits

    @property
    def num_waiting(self) -> int:
        return self._entering + self._in_core

    def check_room(self, count: int) -> None:
        """Raises 429 if `count` more answers would be too many now, 400 if they always would."""
        if self.limit is None or self.num_waiting + count <= self.limit + self._num_free:
            return
        most = self.limit + self._num_seats
        if count > most:
            raise bad_request(
                f"The request asks for {count} answers, but at most {most} may run and wait; ask for fewer at a time.",
                code="too_many_answers",
            )
        self.num_refused += 1
        seconds = self.retry_after()
        message = (
            f"{self.num_waiting} answers wait, {self._num_free} of them may begin at once and {self.limit} more may "
            f"wait, and this request asks for {count}; try again in {seconds} s."
        )
        raise ApiError(429, message, code="queue_full", headers={"retry-after": str(seconds)})

    def enter(self, count: int) -> None:
        """Takes places for `count` answers. Raises as `check_room` does."""
        self.check_room(count)
        self._entering += count
        self._watch()

    def leave_entrance(self, count: int) -> None:
        """The engine has taken so many answers over, or refused them."""
        self._entering -= count

    def follow_core(self, num_waiting: int, num_begun: int, num_free: int) -> None:
        """Answers that wait in the engine, how many have begun there since its start, and seats that are free."""
        self._num_free = num_free
        begun, self._num_begun, self._in_core = num_begun - self._num_begun, num_begun, num_waiting
        if begun and self._since is not None:
            self._begins.append((self._clock() - self._since, begun))
            self._since = None
        self._watch()

    def retry_after(self) -> int:
        """Whole seconds, at least 1, in which all that wait now will have begun at the rate of the last begins.

        Time counts only while somebody waited, so a quiet hour does not make a server look slow."""
        elapsed = 0.0 if self._since is None else self._clock() - self._since
        begun = sum(count for _, count in self._begins)
        seconds = elapsed
        if begun:
            observed = max(elapsed + sum(waited for waited, _ in self._begins), LEAST_SECONDS)
            seconds = self.num_waiting * observed / begun
        return min(max(math.ceil(seconds), 1), MOST_SECONDS)

    def _watch(self) -> None:
        if not self.num_waiting:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
