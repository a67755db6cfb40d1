"""What a step's figures are made of, without a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.bench.step_timing import busy_fraction, time_steady, without_graphs


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0.0),
        ([(3.0, 3.0)], 0.0),
        ([(5.0, 7.0)], 1.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(3.0, 4.0), (0.0, 2.0), (1.0, 2.0)], 0.75),
        ([(0.0, 4.0), (1.0, 2.0), (4.0, 5.0)], 1.0),
    ],
)
def test_busy_is_the_time_with_a_kernel(spans, expected):
    assert busy_fraction(spans) == pytest.approx(expected)


def test_tokens_are_read_one_step_behind():
    events = []

    def execute(output):
        number = sum(kind == "launch" for kind, _ in events)
        events.append(("launch", number))
        return SimpleNamespace(read=lambda: events.append(("read", number)))

    runner = SimpleNamespace(parallel=SimpleNamespace(device=torch.device("cpu")), execute=execute)
    timing, host = time_steady(runner, None, replays=5)
    launched = 0
    for kind, number in events:
        launched += kind == "launch"
        assert kind == "launch" or number in (launched - 2, launched - 1)
    reads = [number for kind, number in events if kind == "read"]
    assert reads == list(range(launched)) and events[2] == ("read", 0)
    assert timing.median > 0 and host > 0


def test_graphs_come_back():
    runner = SimpleNamespace(graphs="graphs", segments="segments")
    with without_graphs(runner):
        assert runner.graphs is None and runner.segments is None
    assert (runner.graphs, runner.segments) == ("graphs", "segments")
