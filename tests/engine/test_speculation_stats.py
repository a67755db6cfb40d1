"""Counts of guesses."""

from __future__ import annotations

from engine.acceptance import GuessOutcome
from engine.draft_choice import DraftChoice
from engine.stats import Distribution, DraftChoiceStats, SpeculationStats


def verified(accepted: int, num: int = 3) -> GuessOutcome:
    return GuessOutcome("a", num, accepted, num, accepted)


def test_nothing_yet():
    snapshot = SpeculationStats(2).snapshot()
    assert snapshot.num_drafts == snapshot.num_proposed_tokens == snapshot.num_accepted_tokens == 0
    assert snapshot.num_accepted_by_position == (0, 0)
    assert snapshot.accept_length == Distribution((1.0, 2.0, 3.0), (0, 0, 0, 0), 0)


def test_chains_guesses_and_lengths():
    stats = SpeculationStats(3)
    stats.observe(2, 0, 3, [GuessOutcome("a", 0, 0, 0, 0), GuessOutcome("b", 0, 0, 0, 0)])
    stats.observe(2, 3, 3, [verified(3), verified(1)])
    stats.observe(2, 3, 3, [verified(0)])  # the other one ended meanwhile
    stats.observe(2, 1, 1, [verified(1, 1), GuessOutcome("new", 0, 0, 0, 0)])
    stats.observe(2, 0, 0, [GuessOutcome("a", 0, 0, 1, 1)])
    snapshot = stats.snapshot()
    assert (snapshot.num_verify_steps, snapshot.num_drafts) == (3, 4)
    assert snapshot.num_proposed_tokens == 6 + 6 + 6 + 2
    assert (snapshot.num_draft_tokens, snapshot.num_accepted_tokens) == (10, 5)
    assert snapshot.num_accepted_by_position == (3, 1, 1) and sum(snapshot.num_accepted_by_position) == 5
    lengths = snapshot.accept_length
    assert lengths.counts == (1, 2, 0, 1, 0) and lengths.total == snapshot.num_accepted_tokens + snapshot.num_drafts


def test_a_snapshot_stays_as_it_is():
    stats, choices = SpeculationStats(1), {1: DraftChoiceStats(1, "gain", "k=1")}
    snapshot = stats.snapshot(choices, {1: {0: 0.01}})
    stats.observe(1, 1, 1, [verified(1, 1)])
    choices.clear()
    assert snapshot.num_drafts == 0 and snapshot.choices[1].num_drafts == 1 and snapshot.step_seconds == {1: {0: 0.01}}


def test_the_choice_shows_its_last_plans():
    choice = DraftChoice(2, available=lambda bucket: {0, 1, 2} if bucket < 3 else {0})
    choice.choose(["a"])
    choice.choose(["a", "b", "c"])
    shown = choice.shown()
    assert list(shown) == [1, 3] and shown[3] == DraftChoiceStats(0, "limit", choice.plans[3].reason)
    assert (shown[1].num_drafts, shown[1].code) == (0, "draft")
