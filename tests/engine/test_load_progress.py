import logging

import pytest

from engine import load_progress
from engine.load_progress import LoadProgress
from engine.log import logger


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_now_and_then_and_one_at_the_end(lines):
    now = [0.0]
    progress = LoadProgress(10 * 10**9, True, lambda: now[0])
    for second in range(1, 11):
        now[0] = float(second)
        progress.add(10**9)
    progress.finish()
    assert lines() == [
        "weights: 5.00 GB of 10.00 GB a rank (50 %), 1.00 GB/s, 5 s left",
        "weights: 10.00 GB of 10.00 GB a rank (100 %), 1.00 GB/s, 0 s left",
        "weights: 10.00 GB a rank in 10.0 s, 1.00 GB/s",
    ]
    assert load_progress.INTERVAL_SECONDS == 5


@pytest.mark.parametrize(("tells", "seconds"), [(False, 100.0), (True, 0.5)])
def test_other_ranks_and_short_loads_say_nothing(lines, tells, seconds):
    now = [0.0]
    progress = LoadProgress(100, tells, lambda: now[0])
    now[0] = seconds
    if not tells:
        progress.add(100)
    progress.finish()
    assert lines() == []
