"""Lines of a log, a bar on a terminal, and what becomes of them at the end."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from engine import log
from engine.loading import display
from engine.loading.display import LoadDisplay, bar, shown
from engine.loading.progress import MEASURING, LoadProgress
from engine.log import logger
from tests.engine.loading.test_progress import Clock, DictStore, world


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    return lambda: [record.getMessage() for record in caplog.records]


def load(display: LoadDisplay, progress: LoadProgress, clock: Clock, seconds: int) -> None:
    """One GB a second, looked at twice a second."""
    for half in range(1, 2 * seconds + 1):
        clock.now = half / 2
        progress.add(10**9 // 2)
        display.tick()
    progress.enter(MEASURING)
    display.tick()
    display.tick()


def test_a_line_every_five_seconds_and_one_at_the_end(lines):
    clock = Clock()
    (progress,) = world(clock, 1, 11 * 10**9)
    load(LoadDisplay(progress), progress, clock, 11)
    assert lines() == [
        "weights: 5.00 of 11.00 GB (45 %), 1.00 GB/s, 6 s left",
        "weights: 10.00 of 11.00 GB (90 %), 1.00 GB/s, 1 s left",
        "weights: 11.00 GB in 11.0 s, 1.00 GB/s",
    ]


def test_a_short_load_is_not_mentioned(lines):
    clock = Clock()
    (progress,) = world(clock, 1, 100)
    clock.now = 0.5
    progress.add(100)
    progress.enter(MEASURING)
    LoadDisplay(progress).tick()
    assert progress.snapshot().is_complete and lines() == []


def test_a_bar_stays_in_its_line_and_is_erased_at_the_end(lines):
    clock, terminal = Clock(), io.StringIO()
    (progress,) = world(clock, 1, 2 * 10**9)
    load(LoadDisplay(progress, terminal), progress, clock, 2)
    drawn = terminal.getvalue()
    assert "\n" not in drawn and drawn.count("\r") == 3 and drawn.endswith("\r\x1b[K")
    assert "[############------------] 1.00 of 2.00 GB (50 %), 1.00 GB/s, 1 s left\x1b[K\r" in drawn
    assert lines() == ["weights: 2.00 GB in 2.0 s, 1.00 GB/s"]


def test_a_bar_is_no_wider_than_the_terminal():
    clock = Clock()
    (progress,) = world(clock, 1, 100)
    shot = progress.snapshot()
    assert [len(bar(shot, columns)) for columns in (0, 1, 20, 60, 80, 300)] == [0, 0, 19, 59, 69, 69]
    assert bar(shot, 50) == shot.words(), "words come first"


def test_a_load_that_fails_leaves_no_thread_and_no_bar(monkeypatch):
    monkeypatch.setattr(display, "TICK_SECONDS", 0.001)
    terminal, drew = io.StringIO(), threading.Event()
    terminal.flush = drew.set
    (progress,) = world(Clock(), 1)
    with pytest.raises(ValueError, match="damaged"), shown(progress, terminal):
        assert drew.wait(20)
        raise ValueError("damaged")
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "load-display" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_is_gone_is_said_once(lines, monkeypatch):
    monkeypatch.setattr(display, "TICK_SECONDS", 0.001)
    progress, gone = LoadProgress(), threading.Event()

    class GoneStore(DictStore):
        def check(self, keys):
            gone.set()
            raise RuntimeError("connection reset")

    progress.join(0, 2, GoneStore())
    with pytest.raises(KeyboardInterrupt), shown(progress, None):
        assert gone.wait(20)
        raise KeyboardInterrupt
    assert lines() == ["the other ranks' progress is not known any more: connection reset"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_of_the_log_replaces_the_bar(monkeypatch, is_terminal):
    before = logger.handlers[:], logger.level, logger.propagate
    stderr = io.StringIO()
    stderr.isatty = lambda: is_terminal
    monkeypatch.setattr(log.sys, "stderr", stderr)
    try:
        log.setup()
        logger.info("a line")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    assert stderr.getvalue().startswith("\x1b[K") == is_terminal and stderr.getvalue().endswith("[rank 0] a line\n")
