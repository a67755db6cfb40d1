"""How far a load has come: a line in the log now and then, with the rate and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.log import logger

INTERVAL_SECONDS = 5.0


class LoadProgress:
    """total: bytes to come, of this rank; tells: whether it writes lines (one rank of all does)."""

    def __init__(self, total: int, tells: bool, clock: Callable[[], float] = time.monotonic):
        self.total, self.done = total, 0
        self._tells, self._clock = tells, clock
        self._began = self._said = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self._tells and self._clock() - self._said >= INTERVAL_SECONDS:
            self._said = self._clock()
            rate = self.done / self.seconds
            left = (self.total - self.done) / rate
            percent = 100 * self.done / self.total
            logger.info("weights: %s of %s a rank (%d %%), %s/s, %.0f s left", *_gb(self.done, self.total), percent,
                        *_gb(rate), left)  # fmt: skip

    def finish(self) -> None:
        """A load that took no time worth mentioning is not mentioned."""
        if self._tells and self.seconds >= 1:
            logger.info("weights: %s a rank in %.1f s, %s/s", *_gb(self.done), self.seconds,
                        *_gb(self.done / self.seconds))  # fmt: skip


def _gb(*counts: float) -> list[str]:
    return [f"{count / 1e9:.2f} GB" for count in counts]
