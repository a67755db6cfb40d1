"""Costs of steps: robust, current, and guessed with care where nothing was measured."""

from __future__ import annotations

import math

import pytest

from engine.step_costs import GUESS_COST, MIN_SAMPLES, StepCosts


def fill(costs: StepCosts, bucket: int, k: int, seconds: float, count: int = 20) -> None:
    for _ in range(count):
        costs.tick(bucket)
        costs.add(bucket, k, seconds)


def test_before_anything_is_measured_costs_are_in_plain_steps():
    curve = StepCosts(3).curve(4)
    assert curve.seconds == pytest.approx([1, 1 + GUESS_COST, 1 + 2 * GUESS_COST, 1 + 3 * GUESS_COST])
    assert curve.least == curve.seconds and all(curve.is_open)


def test_hiccups_and_broken_clocks_do_not_count():
    costs = StepCosts(1)
    for i in range(60):
        costs.add(1, 0, 0.1 if i % 4 == 1 else 0.010 + 0.0001 * (i % 3))
        for broken in (0.0, -1.0, 1e5, math.inf, math.nan):
            costs.add(1, 0, broken)
    assert costs.table()[1][0] == pytest.approx(0.0101, rel=0.02)
    costs.add(1, 0, 999.0)
    assert costs.table()[1][0] == pytest.approx(0.0101, rel=0.02)


def test_too_few_times_are_no_measurement():
    costs = StepCosts(2)
    fill(costs, 1, 0, 0.01, MIN_SAMPLES - 1)
    assert costs.table() == {} and costs.curve(1).is_open[0]
    fill(costs, 1, 0, 0.01, 1)
    assert costs.table() == {1: {0: 0.01}} and not costs.curve(1).is_open[0]


def test_costs_not_measured_lie_between_those_that_are():
    costs = StepCosts(5)
    fill(costs, 1, 1, 0.013)
    fill(costs, 1, 3, 0.018)
    curve = costs.curve(1)
    assert curve.is_open == (True, False, True, False, True, True)
    assert curve.seconds[1] == 0.013 and curve.seconds[3] == 0.018
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.least[2] == pytest.approx(0.0155), "costs grow less and less, so above the middle"
    assert all(least <= seconds for least, seconds in zip(curve.least, curve.seconds, strict=True))
    assert curve.least[0] <= 0.0065 and 0.018 < curve.least[4] < curve.least[5] < curve.seconds[5]


def test_a_new_bucket_is_like_its_nearest():
    costs = StepCosts(2)
    for bucket, ratio in ((1, 1.2), (32, 2.0)):
        fill(costs, bucket, 0, 0.01 * bucket)
        fill(costs, bucket, 2, 0.01 * bucket * ratio)
    assert costs.curve(2).seconds[2] == pytest.approx(1.2)
    assert costs.curve(16).seconds[2] == pytest.approx(2.0)
    fill(costs, 16, 2, 1.0)
    assert costs.curve(16).seconds[0] == pytest.approx(0.5)


def test_costs_that_do_not_run_grow_with_the_one_that_does():
    costs = StepCosts(1)
    fill(costs, 1, 0, 0.010)
    fill(costs, 1, 1, 0.013, 40)
    for step in range(400):
        fill(costs, 1, 1, 0.013 * (1 + step / 2000), 1)
    assert costs.table()[1][0] == pytest.approx(0.012, rel=0.02)
    assert not costs.curve(1).is_open[0], "a fifth is not worth a measurement"
    for step in range(400):
        fill(costs, 1, 1, 0.0156 * (1 + step / 2000), 1)
    assert costs.curve(1).is_open[0], "costs grew by a third and more"


def test_a_change_of_the_number_of_guesses_is_no_growth():
    costs = StepCosts(1)
    for _ in range(10):
        fill(costs, 1, 0, 0.010, 30)
        fill(costs, 1, 1, 0.020, 30)
    assert costs.table()[1] == pytest.approx({0: 0.010, 1: 0.020})


def test_a_cost_of_long_ago_gives_way_to_new_times_but_not_to_a_hiccup():
    costs = StepCosts(1)
    fill(costs, 1, 0, 0.010)
    fill(costs, 1, 1, 0.013, 200)
    fill(costs, 1, 0, 0.1, 1)
    assert costs.table()[1][0] == pytest.approx(0.010)
    fill(costs, 1, 0, 0.014, 4)
    assert costs.table()[1] == pytest.approx({0: 0.014, 1: 0.013})


def test_measuring_again_waits_longer_each_time_it_brings_nothing():
    costs, waits = StepCosts(1), []
    for _ in range(3):
        assert costs.may_measure(1, 1)
        costs.begin_measuring(1, 1)
        waits.append(0)
        while not costs.may_measure(1, 1):
            costs.tick(1)
            waits[-1] += 1
    assert waits[0] >= 100 and waits[1] == 2 * waits[0] and waits[2] == 2 * waits[1]
