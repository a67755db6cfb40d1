"""What steps cost is found from few and uneven samples, never falls with more work, and forgives a hiccup."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prefill_costs import PrefillCosts, StepLoad
from tests.step_budget_sim import attending, linear, sparse


def load_at(tokens: int, context: int = 0, rows: int = 4, kv_tokens: int = 16_000) -> StepLoad:
    return StepLoad(tokens, rows, tokens * (context + tokens / 2), kv_tokens)


def learned(cost, sizes=(16, 64, 128, 256, 512, 1024, 2048), contexts=(0,)) -> PrefillCosts:
    costs = PrefillCosts()
    for context in contexts:
        for tokens in sizes:
            costs.add(load_at(tokens, context), cost(load_at(tokens, context)))
    return costs


@pytest.mark.parametrize("cost", [linear, sparse], ids=lambda c: c.__name__)
def test_sizes_between_those_measured(cost):
    costs = learned(cost)
    for tokens in (20, 48, 100, 300, 700, 1500):
        assert costs.predict(load_at(tokens)) == pytest.approx(cost(load_at(tokens)), rel=0.12)


def test_context_is_told_from_size():
    costs = learned(attending, contexts=(0, 2000, 8000, 30_000))
    for tokens, context in ((64, 90_000), (300, 20_000), (1000, 5000)):
        expected = attending(load_at(tokens, context))
        assert costs.predict(load_at(tokens, context)) == pytest.approx(expected, rel=0.15)


sample = st.tuples(
    st.integers(1, 4096),
    st.integers(0, 100_000),
    st.integers(1, 64),
    st.integers(0, 10**6),
    st.floats(1e-4, 2.0, allow_nan=False),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(sample, min_size=1, max_size=20))
def test_more_work_never_costs_less_whatever_was_measured(samples):
    costs = PrefillCosts()
    for tokens, context, rows, kv_tokens, seconds in samples:
        costs.add(load_at(tokens, context, rows, kv_tokens), seconds)
    curve = [costs.predict(load_at(tokens, 5000)) for tokens in (1, 16, 17, 100, 256, 1000, 2000, 5000)]
    assert curve == sorted(curve) and curve[0] > 0
    contexts = [costs.predict(load_at(100, context)) for context in (0, 10, 1000, 10**5)]
    assert contexts == sorted(contexts)


def test_a_hiccup_moves_nothing_and_a_second_one_in_a_row_is_believed():
    costs = learned(linear)
    before = costs.predict(load_at(1024))
    costs.add(load_at(1024), 2.0)
    assert costs.predict(load_at(1024)) == before
    for _ in range(6):
        costs.add(load_at(1024), before)
        costs.add(load_at(1024), 2.0)
    assert costs.predict(load_at(1024)) == pytest.approx(before, rel=0.02)
    for _ in range(12):
        costs.add(load_at(1024), 0.2)
    assert costs.predict(load_at(1024)) == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_costs_that_rise_or_fall_are_followed_at_all_sizes(factor):
    costs = learned(sparse)
    for _ in range(10):
        costs.add(load_at(700), factor * sparse(load_at(700)))
    assert costs.predict(load_at(700)) == pytest.approx(factor * sparse(load_at(700)), rel=0.05)
    assert costs.predict(load_at(1000)) == pytest.approx(factor * sparse(load_at(1000)), rel=0.25)


def test_noise_averages_out():
    rng, costs = random.Random(0), learned(attending)
    for _ in range(100):
        load = load_at(rng.randrange(400, 1200), rng.randrange(0, 30_000))
        costs.add(load, attending(load) * (1 + 0.05 * rng.gauss(0, 1)))
    for tokens, context in ((500, 1000), (1000, 20_000)):
        expected = attending(load_at(tokens, context))
        assert costs.predict(load_at(tokens, context)) == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_what_no_step_takes_is_dropped(seconds):
    costs = PrefillCosts()
    costs.add(load_at(100), seconds)
    assert not costs.is_measured and costs.predict(load_at(100)) == 0.0
    costs.add(load_at(100), 0.03)
    costs.add(load_at(100), seconds)
    assert costs.predict(load_at(100)) == pytest.approx(0.03, rel=0.05)


def test_steps_measured_in_advance_give_way_to_those_of_service():
    costs = PrefillCosts()
    costs.seed((load_at(tokens, rows=0, kv_tokens=0), 0.6 * sparse(load_at(tokens))) for tokens in (128, 512, 2048))
    assert costs.predict(load_at(512)) == pytest.approx(0.6 * sparse(load_at(512)), rel=0.05)
    for _ in range(5):
        costs.add(load_at(800), sparse(load_at(800)))
    assert costs.predict(load_at(800)) == pytest.approx(sparse(load_at(800)), rel=0.05)
    assert costs.most_tokens == 2048 and costs.most_pairs == 2048**2 / 2
