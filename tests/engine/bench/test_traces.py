"""Traces are the same for the same seed, and as long and as shared as asked."""

from __future__ import annotations

import statistics

import pytest

from engine.bench import traces
from engine.bench.traces import Session

VOCABULARY = 1000


def prompts(sessions: list[Session]) -> list[list[int]]:
    return [session.turns[0].new_ids for session in sessions]


def shared(one: list[int], two: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_fixed_requests_have_their_lengths_and_share_nothing():
    made = traces.fixed(5, 100, 7, VOCABULARY, seed=3)
    assert [len(p) for p in prompts(made)] == [100] * 5 and {s.turns[0].max_tokens for s in made} == {7}
    assert all(0 <= t < VOCABULARY for p in prompts(made) for t in p)
    assert max(shared(a, b) for i, a in enumerate(prompts(made)) for b in prompts(made)[:i]) <= 2
    assert made == traces.fixed(5, 100, 7, VOCABULARY, seed=3) != traces.fixed(5, 100, 7, VOCABULARY, seed=4)


@pytest.mark.parametrize(("share", "common"), [(0.0, 0), (0.9, 180), (1.0, 200)])
def test_groups_share_a_beginning(share, common):
    made = prompts(traces.shared_prefix(6, 200, 4, share, 2, VOCABULARY, seed=0))
    within = [shared(made[i], made[i + 2]) for i in range(4)]
    assert all(common <= length <= min(common + 2, 200) for length in within)
    assert shared(made[0], made[1]) <= 2, "another group begins otherwise"


def test_agents_grow_by_turns_and_share_their_tools():
    made = traces.agents(40, 12, 1.0, 200_000, VOCABULARY, seed=1)
    assert made == traces.agents(40, 12, 1.0, 200_000, VOCABULARY, seed=1)
    starts = prompts(made)
    assert min(shared(starts[0][:9000], start[:9000]) for start in starts) == 9000
    same, other = (shared(starts[0], starts[i][: len(starts[0])]) for i in (2, 1))
    assert same >= len(starts[0]) - traces.TASK_TOKENS and other < same - 400, "two system prompts in turn"
    counts = [len(session.turns) for session in made]
    assert min(counts) >= 3 and 8 < statistics.mean(counts) < 18
    appended = [len(turn.new_ids) for session in made for turn in session.turns[1:]]
    answers = [turn.max_tokens for session in made for turn in session.turns]
    assert 350 < statistics.median(appended) < 600 and max(appended) > 10 * statistics.median(appended)
    assert 120 < statistics.median(answers) < 220
    assert all(session.turns[0].think_seconds == 0.0 for session in made)
    assert 0.5 < statistics.median(turn.think_seconds for s in made for turn in s.turns[1:]) < 1.3


def test_one_factor_scales_lengths_and_sessions_stay_within_the_context():
    small = traces.agents(20, 12, 0.03, 4096, VOCABULARY, seed=1)
    assert all(session.turns and session.num_tokens <= 4096 for session in small)
    assert min(len(p) for p in prompts(small)) >= 280 and max(len(p) for p in prompts(small)) <= 800
    assert min(turn.max_tokens for session in small for turn in session.turns) >= 1
    cut = traces.agents(20, 12, 0.03, 1000, VOCABULARY, seed=1)
    assert all(session.num_tokens <= 1000 for session in cut)
    assert sum(len(s.turns) for s in cut) < sum(len(s.turns) for s in small)


def test_think_times_are_left_out_by_a_factor_of_nothing():
    made = traces.agents(5, 6, 0.1, 100_000, VOCABULARY, seed=2, think=0.0)
    assert {turn.think_seconds for session in made for turn in session.turns} == {0.0}


def test_arrivals_are_a_poisson_process():
    times = traces.arrivals(4000, 20.0, seed=5)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) == traces.arrivals(4000, 20.0, seed=5)
    assert statistics.mean(gaps) == pytest.approx(0.05, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.08), "as spread as they are long"


def test_a_session_survives_its_journey_as_json():
    session = traces.agents(1, 4, 0.01, 4096, VOCABULARY, seed=0)[0]
    assert Session.from_dict(session.to_dict()) == session
