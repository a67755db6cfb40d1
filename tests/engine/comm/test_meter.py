"""What is counted is counted once, and never falls."""

from __future__ import annotations

import time

import pytest

from engine.comm.meter import ATTENTION_REDUCE, MOE_ALL_REDUCE, MOE_COMBINE, MOE_DISPATCH, CommMeter


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_time_belongs_to_what_is_counted_next():
    meter = CommMeter()
    with meter.clock():
        busy(0.02)
    with meter.clock():
        busy(0.01)
    meter.count(ATTENTION_REDUCE, 5)
    meter.count(MOE_DISPATCH, 0)
    assert meter.rounds[ATTENTION_REDUCE] == meter.rounds[MOE_DISPATCH] == 1 and meter.bytes[ATTENTION_REDUCE] == 5
    assert set(meter.seconds) == {ATTENTION_REDUCE} and meter.seconds[ATTENTION_REDUCE] >= 0.03


def test_collectives_of_a_part_of_the_ranks_lie_between_two_of_all():
    """So that a rank whose group has more of them is not taken for ahead of one that has come to the next of all."""
    meter, positions = CommMeter(), []
    for _ in range(3):
        for _ in range(50):
            meter.enter_part()
            positions.append(meter.position)
        meter.calls += 1
        positions.append(meter.position)
    assert positions == sorted(set(positions)) and positions[-1] == 3
    assert 2 < positions[-2] < 3 and positions[50] == 1


def test_a_collective_made_of_another_is_timed_once():
    meter = CommMeter()
    started = time.perf_counter()
    with meter.clock():
        busy(0.02)
        with meter.clock():
            busy(0.02)
    meter.count(MOE_COMBINE, 1)
    assert 0.04 <= meter.seconds[MOE_COMBINE] <= time.perf_counter() - started


def test_apart_leaves_no_trace_also_when_it_fails():
    meter = CommMeter()
    meter.count(MOE_COMBINE, 7)
    meter.seconds[MOE_COMBINE] = 0.1
    before = {name: dict(getattr(meter, name)) for name in ("rounds", "bytes", "seconds")}
    with pytest.raises(KeyError), meter.apart() as apart:
        with meter.clock():
            busy(0.001)
        meter.count(MOE_COMBINE, 3, rounds=2)
        raise KeyError
    assert (apart.rounds[MOE_COMBINE], apart.bytes[MOE_COMBINE]) == (2, 3) and apart.seconds[MOE_COMBINE] > 0
    assert {name: getattr(meter, name) for name in before} == before
    meter.add(apart)
    assert meter.rounds[MOE_COMBINE] == 3 and meter.seconds[MOE_COMBINE] > 0.1


def test_estimates_are_of_what_was_counted_and_measured():
    meter = CommMeter()
    meter.count(ATTENTION_REDUCE, 0, rounds=61)
    meter.count(MOE_DISPATCH, 0, rounds=60)
    meter.count(MOE_COMBINE, 0, rounds=61)
    meter.estimate({ATTENTION_REDUCE: 7e-6, MOE_DISPATCH: 0.0, MOE_COMBINE: 8e-6, MOE_ALL_REDUCE: 8e-6})
    assert meter.seconds == pytest.approx({ATTENTION_REDUCE: 61 * 7e-6, MOE_COMBINE: 61 * 8e-6})


def test_clear():
    meter = CommMeter()
    with meter.clock():
        pass
    meter.count(MOE_COMBINE, 3)
    with meter.clock():
        pass
    meter.clear()
    assert meter == CommMeter()
