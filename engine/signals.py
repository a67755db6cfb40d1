"""SIGINT and SIGTERM: how a first one is told from a second."""

from __future__ import annotations

import os
import signal
import time


class Signals:
    """Tells a second signal from the first. torchrun passes on a Ctrl-C that the terminal sent to every process, so
    under it the same signal within a second is still the first."""

    def __init__(self):
        self._first: tuple[int, float] | None = None

    def is_second(self, number: int) -> bool:
        if self._first is None:
            self._first = (number, time.monotonic())
            return False
        passed_on = number == signal.SIGINT and "TORCHELASTIC_RUN_ID" in os.environ
        return not (passed_on and self._first[0] == number and time.monotonic() < self._first[1] + 1.0)
