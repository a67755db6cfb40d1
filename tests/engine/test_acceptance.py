"""Acceptance rates: what is usual, what a request shows, what is forgotten."""

from __future__ import annotations

import random

import pytest

from engine.acceptance import FIRST_RATE, AcceptanceRates, GuessOutcome


def outcome(request_id: str, matched: int, compared: int = 3) -> GuessOutcome:
    return GuessOutcome(request_id, compared, matched, compared, matched)


def test_rates_become_those_of_the_draft():
    rates, rng = AcceptanceRates(3), random.Random(0)
    truth = (0.9, 0.5, 0.2)
    for _ in range(400):
        matched = 0
        while matched < 3 and rng.random() < truth[matched]:
            matched += 1
        rates.observe([outcome("a", matched)])
    assert rates.usual == pytest.approx(truth, abs=0.15)
    assert rates.expected_tokens(["a"]) == pytest.approx([1, 1.9, 2.35, 2.44], abs=0.3)


def test_a_new_request_starts_with_what_is_usual_and_goes_its_own_way():
    rates = AcceptanceRates(2)
    assert rates.expected_tokens(["a"]) == [1.0, 1 + FIRST_RATE, 1 + FIRST_RATE + FIRST_RATE**2]
    for _ in range(100):
        rates.observe([outcome("a", 0, 2)])
    (_, usual, _) = rates.expected_tokens(["b"])
    assert usual == pytest.approx(1 + rates.usual[0]) and usual < 1.1
    for _ in range(20):
        rates.observe([outcome("a", 0, 2), outcome("b", 2, 2)])
    assert rates.expected_tokens(["a"])[1] < 1.1 and rates.expected_tokens(["b"])[1] > 1.7


def test_positions_after_a_failure_are_not_looked_at():
    rates = AcceptanceRates(3)
    for _ in range(50):
        rates.observe([outcome("a", 1)])
    first, second, third = rates.usual
    assert first > 0.9 and second < 0.1 and third == FIRST_RATE


def test_no_guesses_show_nothing_and_one_beyond_those_verified_counts():
    rates = AcceptanceRates(3)
    rates.observe([GuessOutcome("a", 0, 0, 0, 0)] * 9)
    assert rates.usual == (FIRST_RATE,) * 3
    rates.observe([GuessOutcome("a", 0, 0, 1, 1)])
    assert rates.usual[0] > FIRST_RATE and rates.usual[1] == FIRST_RATE


def test_many_requests_and_one_observation_each_are_as_good_as_many_of_one():
    one, many = AcceptanceRates(1), AcceptanceRates(1)
    for i in range(40):
        one.observe([outcome("a", i % 4 == 0, 1)])
    many.observe([outcome(str(i), i % 4 == 0, 1) for i in range(40)])
    assert many.usual[0] == pytest.approx(one.usual[0], abs=0.05)


def test_a_rare_observation_counts_about_as_much_as_all_before():
    rates = AcceptanceRates(2)
    for _ in range(200):
        rates.observe([outcome("a", 0, 2)])
    rates.observe([outcome("a", 1, 1)])
    assert rates.usual[0] < 0.1
    rates.observe([outcome("a", 1, 1)], rarely=True)
    assert 0.4 < rates.usual[0] < 0.7 and rates.expected_tokens(["a"])[1] > 1.4


def test_a_doubted_position_becomes_what_the_one_before_is():
    rates = AcceptanceRates(3)
    for _ in range(50):
        rates.observe([outcome("a", 1)])
    before = rates.usual
    for _ in range(20):
        rates.doubt(1)
    assert rates.usual[0] == before[0] and rates.usual[1] > 0.9 and rates.expected_tokens(["a"])[2] > 2.7
    for _ in range(6):
        rates.observe([outcome("a", 1)])
    assert rates.expected_tokens(["a"])[2] < 2.45, "soon found out again"


def test_requests_past_the_draft_get_one_token_each():
    rates = AcceptanceRates(2)
    with_a = rates.expected_tokens(["a"])
    assert rates.expected_tokens(["a", "b"], {"b"}) == [value + 1 for value in with_a]
    assert rates.expected_tokens(["a", "b"], {"b"}, most=1) == [2.0, 1 + with_a[1]]


def test_ended_requests_are_forgotten():
    rates = AcceptanceRates(2)
    rates.observe([outcome(str(i), 0, 2) for i in range(10)])
    rates.forget("3")
    rates.forget("no such")
    assert len(rates) == 9 and not rates.knows("3")
    rates.keep(["1", "2", "3"])
    assert len(rates) == 2 and rates.knows("1")
