"""The choice of the number of guesses, on a made-up machine with a made-up draft."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.acceptance import GuessOutcome
from engine.draft_choice import CHOICE_CODES, DraftChoice, Plan, StepOutcome
from tests.engine.decoding_sim import SPARSE, Decoding, Machine, best_speed

K = 3
BUCKETS = sorted(SPARSE)
FLAT = dict.fromkeys(BUCKETS, tuple(1 + 0.03 * k for k in range(8)))
CPU = dict.fromkeys(BUCKETS, tuple(1 + 0.35 * k for k in range(8)))
SHAPES = {"sparse": SPARSE, "flat": FLAT, "cpu": CPU}
USELESS, MIDDLING, GOOD = (0.0,) * 7, (0.6, 0.6, 0.6, 0.6, 0.5, 0.5, 0.5), (0.85,) * 7


def make_choice(most: int = K, **options) -> DraftChoice:
    return DraftChoice(most, bucket_of=lambda n: next(b for b in BUCKETS if b >= n), **options)


def machine(shape: str = "sparse", **options) -> Machine:
    return Machine(SHAPES[shape], **{"noise": 0.03, "hiccups": 0.02} | options)


def names(count: int) -> list[str]:
    return [f"r{i}" for i in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_requests", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("rates", [MIDDLING, GOOD], ids=["middling", "good"])
def test_finds_the_best_number(shape, num_requests, rates):
    steps = 1200 if num_requests < 8 else 300
    sim = Decoding(make_choice(), machine(shape), lambda *_: rates, seed=num_requests)
    run = sim.run(names(num_requests), steps)
    best, _ = best_speed(sim.machine, num_requests, rates, K)
    assert run.speed > best * 0.94
    plain, _ = best_speed(sim.machine, num_requests, USELESS, K)
    assert run.speed > plain * 0.98


@pytest.mark.parametrize("shape", SHAPES)
def test_seven_guesses_are_as_well_chosen(shape):
    for num_requests, rates in ((1, GOOD), (8, MIDDLING), (32, GOOD)):
        sim = Decoding(make_choice(7), machine(shape), lambda *_, rates=rates: rates, seed=5)
        run = sim.run(names(num_requests), 700)
        assert run.speed > 0.93 * best_speed(sim.machine, num_requests, rates, 7)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [3, 7])
@pytest.mark.parametrize("num_requests", [1, 8, 64])
def test_a_useless_draft_costs_less_than_one_percent(shape, most, num_requests):
    """Over 2,000 steps, the beginning with it."""
    sim = Decoding(make_choice(most), machine(shape), lambda *_: USELESS, seed=1)
    run = sim.run(names(num_requests), 2000 if num_requests == 1 else 400)
    plain, _ = best_speed(sim.machine, num_requests, USELESS, most)
    assert run.speed > plain * (0.99 if num_requests == 1 else 0.975)


def test_a_useless_draft_costs_little_where_requests_are_short():
    sim = Decoding(make_choice(), machine(), lambda *_: USELESS, seed=2)
    runs = [sim.run([f"{i}"], 40) for i in range(50)]
    plain, _ = best_speed(sim.machine, 1, USELESS, K)
    assert sum(r.tokens for r in runs) / sum(r.seconds for r in runs) > 0.985 * plain


@pytest.mark.parametrize("num_requests", [1, 4, 32])
def test_acceptance_that_goes_and_comes_back(num_requests):
    rates = lambda _, step: USELESS if 600 <= step < 1200 else GOOD  # noqa: E731
    sim = Decoding(make_choice(), machine(), rates, seed=3)
    ids = names(num_requests)
    first, gone, back = (sim.run(ids, 600) for _ in range(3))
    plain, best = (best_speed(sim.machine, num_requests, r, K)[0] for r in (USELESS, GOOD))
    assert first.speed > 0.93 * best
    assert gone.speed > 0.95 * plain and gone.share(0, 60) > 0.95
    resumed = next(i for i, plan in enumerate(back.plans) if plan.num_verify)
    assert resumed < 400 and back.share(0, resumed + 60) < 0.1


def test_later_guesses_that_become_right_are_found_again():
    """While one guess is verified nothing shows what a second would be worth."""
    rates = lambda _, step: (0.9, 0.0, 0.0) if step < 300 else (0.9, 0.95, 0.95)  # noqa: E731
    sim = Decoding(make_choice(), machine("cpu"), rates, seed=14)
    assert sim.run(["a"], 300).share(1, 100) > 0.8
    later = sim.run(["a"], 900)
    assert later.share(2, 700) + later.share(3, 700) > 0.8


def test_a_request_that_ends_takes_its_acceptance_along():
    """The good one ends: what is left does not pay; a good one comes: it does again."""
    rates = lambda request_id, _: GOOD if request_id.startswith("good") else USELESS  # noqa: E731
    sim = Decoding(make_choice(), machine("flat"), rates, seed=4)
    both = sim.run(["good", "bad"], 300)
    assert both.share(0, 50) < 0.1
    sim.choice.forget("good")
    assert sim.run(["bad"], 300).share(0, 50) > 0.9
    assert sim.run(["bad", "good too"], 500).share(0, 200) < 0.2


def test_grown_contexts_do_not_mislead():
    sim = Decoding(make_choice(), machine(growth=0.012 / 1000), lambda *_: GOOD, seed=6)
    sim.run(["a"], 1900)
    late = sim.run(["a"], 100)
    assert late.speed > 0.95 * best_speed(sim.machine, 1, GOOD, K, step=1950)[0]
    table = sim.choice.costs.table()[1]
    assert table[0] == pytest.approx(sim.machine.seconds(1, Plan(0, 0, "plain"), 2000), rel=0.15)


def test_a_machine_that_changes_is_measured_again():
    """Verifying becomes dear after the costs were learnt: plain steps are found to be better."""
    sim = Decoding(make_choice(), machine("flat"), lambda *_: MIDDLING, seed=7)
    assert sim.run(["a"], 300).share(0, 50) < 0.1
    sim.machine = replace(sim.machine, ratios=dict.fromkeys(BUCKETS, (1.0, 3.0, 3.5, 4.0)))
    assert sim.run(["a"], 300).share(0, 150) > 0.9


@pytest.mark.parametrize("seconds", [None, 0.0, -1.0, float("inf")])
def test_without_times_the_first_guess_at_costs_decides(seconds):
    sim = Decoding(make_choice(), machine("flat"), lambda *_: GOOD, seed=8)
    sim._clock = lambda _: seconds
    assert sim.run(["a"], 300).share(0, 50) < 0.1
    assert sim.choice.costs.table() == {}
    sim.rates = lambda *_: USELESS
    assert sim.run(["a"], 300).share(0, 100) > 0.95


def test_plans_are_steps_that_exist_and_guesses_come_before_they_are_verified():
    rates = lambda _, step: GOOD if step // 100 % 2 else USELESS  # noqa: E731
    sim = Decoding(make_choice(), machine(hiccups=0.1), rates, seed=9)
    plans = [plan for count in (1, 5, 1, 17, 60) for plan in sim.run(names(count), 300).plans]
    exist = {(0, 0), (0, K)} | {(k, k) for k in range(1, K + 1)}
    assert {plan[:2] for plan in plans} <= exist
    assert all(after.num_verify == 0 or before.num_propose > 0 for before, after in itertools.pairwise(plans))
    assert {plan.code for plan in plans} <= set(CHOICE_CODES) and all(plan.reason for plan in plans)
    assert {"gain", "plain", "probe", "draft", "measure"} <= {plan.code for plan in plans}


def test_only_steps_that_a_bucket_has():
    available = {1: {0, 2, 3}, 8: {0, 1}, 64: {0}}
    choice = DraftChoice(K, lambda n: next(b for b in available if b >= n), available.__getitem__)
    sim = Decoding(choice, machine("flat"), lambda *_: GOOD, seed=10)
    assert set(sim.run(names(1), 200).counts()) <= {0, 2, 3}
    assert set(sim.run(names(8), 200).counts()) == {0, 1}
    run = sim.run(names(64), 50)
    assert set(run.counts()) == {0} and {plan[:2] for plan in run.plans} == {(0, 0)}
    assert choice.plans[64].code == "limit"


def test_past_the_draft_nothing_is_guessed():
    sim = Decoding(make_choice(), machine("flat"), lambda *_: GOOD, seed=11)
    assert sim.run(names(2), 100).share(0, 20) < 0.2
    past = sim.run(names(2), 100, beyond=frozenset(names(2)))
    assert {plan[:3] for plan in past.plans} == {(0, 0, "beyond")}
    usual = sim.choice.rates.usual
    sim.choice.observe(StepOutcome(1, 3, 3, None, [GuessOutcome("r0", 3, 0, 3, 0)]))
    assert sim.choice.rates.usual == usual, "what it guesses there says nothing of the draft"


def test_one_request_past_the_draft_makes_guessing_pay_less():
    sim = Decoding(make_choice(), machine("cpu"), lambda i, _: GOOD if i == "r0" else USELESS, seed=12)
    assert sim.run(["r0"], 300).share(0, 50) < 0.2
    past = frozenset(names(9)[1:])
    assert sim.run(names(9), 300, beyond=past).share(0, 50) > 0.9


def test_fixed_is_fixed():
    choice = make_choice(adaptive=False, available=lambda bucket: {0, 1, 3} if bucket < 64 else {0, 1})
    sim = Decoding(choice, machine(), lambda *_: USELESS, seed=13)
    run = sim.run(names(2), 50)
    assert [plan[:2] for plan in run.plans] == [(0, K)] + [(K, K)] * 49
    assert {plan[:2] for plan in sim.run(names(64), 20).plans} == {(1, 1)}
    assert choice.plans[2].code == choice.plans[64].code == "fixed"
    assert choice.choose(["a"], num_guesses=0)[:2] == (0, K), "the step before left no guesses"
    assert choice.choose(["a"], {"a"}, K)[:3] == (0, 0, "beyond"), "the draft has no such positions"


def test_reasons_are_short_and_say_why():
    assert Plan(3, 3, "gain", 3, 2.41, 1.62).reason == "k=3: 2.41 tokens in 1.62 plain steps"
    assert Plan(0, 0, "plain", 1, 1.2, 1.29).reason == "plain: k=1 would give 0.93x"
    assert [len(Plan(0, 0, code, 2).reason) < 60 for code in CHOICE_CODES] == [True] * len(CHOICE_CODES)


def test_ended_requests_do_not_pile_up():
    choice = make_choice()
    for i in range(3000):
        choice.choose([f"r{i}", f"r{i + 1}"])
    assert len(choice.rates) < 600


@st.composite
def histories(draw) -> list[tuple]:
    """Steps: (requests, of which past the draft, guesses left if told, seconds, guesses compared and matched)."""
    seconds = st.one_of(st.none(), st.floats(), st.just(0.01))
    step = st.tuples(
        st.sets(st.sampled_from("abcdef"), min_size=1), st.sets(st.sampled_from("abcdef")),
        st.one_of(st.none(), st.integers(0, K)), seconds, st.integers(0, K + 1), st.integers(0, K + 1),
    )  # fmt: skip
    return draw(st.lists(step, min_size=1, max_size=60))


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 10))
def test_whatever_happens_a_plan_exists_and_numbers_stay_sane(history, delay):
    allowed = {1: {0, 1, 2, 3}, 2: {0, 3}, 4: {0, 1}, 8: {0}}
    choice = DraftChoice(K, lambda n: next(b for b in allowed if b >= n), allowed.__getitem__)
    unread = []
    for ids, past, num_guesses, seconds, compared, matched in history:
        plan = choice.choose(sorted(ids), past, num_guesses)
        assert plan.num_verify in allowed[next(b for b in allowed if b >= len(ids))] and plan.reason
        assert plan.num_propose == plan.num_verify or plan[:2] == (0, K)
        matched = min(matched, compared)
        verified = min(compared, plan.num_verify)
        outcomes = [GuessOutcome(i, verified, min(matched, verified), compared, matched) for i in sorted(ids)]
        unread.append(StepOutcome(len(ids), *plan[:2], seconds, outcomes))
        if len(unread) > delay:
            choice.observe(unread.pop(0))
    assert all(0 <= rate <= 1 for rate in choice.rates.usual)
    assert all(value > 0 for costs in choice.costs.table().values() for value in costs.values())
    tokens = choice.rates.expected_tokens(["a", "new"])
    assert tokens == sorted(tokens) and tokens[0] == 2 and tokens[-1] <= 2 * (K + 1)
