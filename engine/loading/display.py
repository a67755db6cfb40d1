"""Shows a load's progress: on a terminal one bar that stays in its place, else a line in the log now and then."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.loading.progress import MEASURING, READY, LoadProgress, Snapshot
from engine.log import logger

LINE_SECONDS = 5.0
TICK_SECONDS = 0.5
MENTIONED_SECONDS = 1.0  # a load that took less is not mentioned
_LEAST_WIDTH, _MOST_WIDTH = 6, 24
_CLEAR = "\x1b[K"


class LoadDisplay:
    """Of rank 0. terminal: where the bar goes, None for lines. `tick` looks at the ranks and shows what is new."""

    def __init__(self, progress: LoadProgress, terminal: TextIO | None = None):
        self._progress, self._terminal = progress, terminal
        self._said, self._is_drawn, self._is_told = 0.0, False, False

    def tick(self) -> None:
        self._progress.poll()
        shot = self._progress.snapshot()
        if shot.is_complete:
            self._finish(shot)
        elif shot.total and self._terminal is not None:
            self._draw(bar(shot, shutil.get_terminal_size().columns))
        elif shot.total and shot.seconds - self._said >= LINE_SECONDS:
            self._said = shot.seconds
            logger.info("weights: %s", shot.words())

    def erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._terminal.write(_CLEAR)
            self._terminal.flush()

    def _finish(self, shot: Snapshot) -> None:
        """Once, when nothing more will be read: a draft comes after the model."""
        self.erase()
        if shot.phase in (MEASURING, READY) and not self._is_told:
            self._is_told = True
            if shot.seconds >= MENTIONED_SECONDS:
                logger.info("weights: %s", shot.summary())

    def _draw(self, text: str) -> None:
        """The cursor goes back to the line's begin, so that a line of the log replaces the bar."""
        self._is_drawn = True
        self._terminal.write(f"{text}{_CLEAR}\r")
        self._terminal.flush()


def bar(shot: Snapshot, columns: int) -> str:
    """`[######------] 5.00 of 10.00 GB (50 %), ...`, no longer than the terminal is wide: words come first."""
    words, room = shot.words(), max(columns - 1, 0)
    width = min(_MOST_WIDTH, room - len(words) - len("[] "))
    if width < _LEAST_WIDTH:
        return words[:room]
    filled = width * shot.percent // 100
    return f"[{'#' * filled}{'-' * (width - filled)}] {words}"


@contextmanager
def shown(progress: LoadProgress, terminal: TextIO | None) -> Iterator[None]:
    """A thread ticks until the block ends, however it does."""
    display, ended = LoadDisplay(progress, terminal), threading.Event()

    def work() -> None:
        while not ended.wait(TICK_SECONDS):
            try:
                display.tick()
            except RuntimeError as error:  # torch's stores: the one that ranks share is gone
                logger.warning("the other ranks' progress is not known any more: %s", error)
                return

    thread = threading.Thread(target=work, name="load-display", daemon=True)
    thread.start()
    try:
        yield
        ended.set()
        thread.join()
        display.tick()  # every rank has started: what it has said is all of its share
    finally:
        ended.set()
        thread.join()
        display.erase()
        progress.leave()
