"""Where the host's time of a step goes: clocks around the parts of the engine that every step passes through."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.core import EngineCore
from engine.decode_batch import DecodeBatch
from engine.input_batch import InputBatch
from engine.output_processor import OutputProcessor
from engine.scheduler import Scheduler
from engine.step_output import ModelRunnerOutput

PARTS = ("schedule", "inputs", "launch", "update", "output", "rest")
WAIT = "wait"


class PartsClock:
    """Seconds of each part, without those of the parts within it. A pair of marks costs about a microsecond."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def begin(self, part: str) -> None:
        self._pass()
        self._open.append(part)

    def end(self) -> None:
        self._pass()
        self._open.pop()

    def _pass(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """What has come together since the last call."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def around(self, part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return timed


@contextmanager
def clocked(clock: PartsClock, runner_class: type) -> Iterator[None]:
    """Within it every step of a core in this process is on the clock."""
    places = [
        (EngineCore, "step", "rest"),
        (Scheduler, "schedule", "schedule"),
        (DecodeBatch, "fill", "inputs"),
        (InputBatch, "build", "inputs"),
        (runner_class, "execute", "launch"),
        (Scheduler, "launch", "launch"),
        (ModelRunnerOutput, "read", "update"),
        (Scheduler, "update", "update"),
        (OutputProcessor, "process", "output"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, part in places:
            setattr(owner, name, clock.around(part, getattr(owner, name)))
        ModelRunnerOutput.read = _after_waiting(clock, ModelRunnerOutput.read)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _after_waiting(clock: PartsClock, read: Callable) -> Callable:
    """Waiting for the device is no work of the host."""

    def timed(result: ModelRunnerOutput) -> Any:
        if result.unread is not None and result.unread.event is not None:
            clock.begin(WAIT)
            result.unread.event.synchronize()
            clock.end()
        return read(result)

    return timed
