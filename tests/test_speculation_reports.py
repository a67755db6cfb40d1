"""Reports of speculation's faults in other engines, by the number of the report, tried here.

B124 and B135 are looked at elsewhere too: tests/draft/eagle3/test_drafter.py compares every guess with a slow
reference, and tests/engine/test_speculation.py counts tokens for every budget and every place of an end. B123, B131 and
B133, which speak of cached prefixes, are tried with blocks of 8 in tests/engine/test_prefix_answers.py too.
"""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from tests.answers import Answer, ask, drain
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scripted_drafts import build, build_real, one_more_each_time, right, says, sometimes, teach

EOS = 256 + SMALL.num_merges + 1
SHAPE = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(17 * i * (seed + 3) + seed) % 290 for i in range(length)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("reports") / "model", SMALL)


@pytest.fixture(scope="module")
def plain(checkpoint) -> EngineCore:
    return build(checkpoint, None, max_num_seqs=32, max_model_len=256)


@pytest.fixture(scope="module", params=["eager", "ahead"])
def guessing(request, checkpoint) -> EngineCore:
    return build(checkpoint, 4, request.param == "ahead", max_num_seqs=8, max_model_len=256)


def check(plain: EngineCore, guessing: EngineCore, requests: list, script=sometimes) -> list[Answer]:
    expected = ask(plain, *requests)
    teach(guessing, requests, expected, script)
    found = ask(guessing, *requests)
    assert [(a.token_ids, a.text, a.end) for a in found] == [(a.token_ids, a.text, a.end) for a in expected]
    return found


def test_b123_a_prompt_and_then_more_of_it_four_times(plain, guessing):
    start = prompt_of(150)
    for longer in (0, 5, 9, 30, 64):
        (answer,) = check(plain, guessing, [(start + prompt_of(longer, 1), greedy(12))])
        assert answer.metrics.num_accepted_tokens > 0


def test_b124_guesses_in_the_output_are_those_of_a_fresh_prefill(tmp_path, checkpoint):
    """Step by step: what the draft wrote while it guessed leaves no trace."""
    draft = write_draft(tmp_path, SHAPE, seed=9, layer_ids=(0, 1, 2))
    core, fresh = (build_real(checkpoint, draft, 4, max_num_seqs=2, max_model_len=256) for _ in range(2))
    core.add_request("long", prompt_of(20), greedy(20))
    compared = 0
    while core.has_unfinished():
        core.step()
        request = core.replica.scheduler.get("long")
        if request is None or not request.guess_ids:
            continue
        tokens = request.token_ids(0, request.num_tokens)
        fresh.add_request("fresh", tokens[:-1], greedy(5))
        while fresh.replica.scheduler.get("fresh") is None or not fresh.replica.scheduler.get("fresh").guess_ids:
            fresh.step()
        assert fresh.replica.scheduler.get("fresh").guess_ids == request.guess_ids
        compared += 1
        fresh.abort_request("fresh")
        drain(fresh)
    assert compared > 12


def test_b127_requests_that_end_in_waves(plain, guessing):
    requests = [(prompt_of(4 + i, i), greedy(5 + 5 * (i // 2))) for i in range(10)]
    for script in (right, one_more_each_time):
        check(plain, guessing, requests, script)


@pytest.mark.parametrize("count", [3, 5, 7])
def test_b128_batches_between_two_buckets(plain, guessing, count):
    requests = [(prompt_of(6, i), greedy(40)) for i in range(count)]
    check(plain, guessing, requests, one_more_each_time)


def test_requests_longer_than_the_draft(tmp_path, checkpoint, plain):
    """B129: a draft of 64 positions, a target of 256: guesses end at the limit, the answer goes on."""
    draft = write_draft(tmp_path, SHAPE, layer_ids=(0, 1, 2), max_position_embeddings=64)
    core = build_real(checkpoint, draft, 3, max_num_seqs=4, max_model_len=256)
    requests = [(prompt_of(100), greedy(30)), (prompt_of(20, 1), greedy(100))]
    expected = ask(plain, *requests)
    for request, one in zip(requests, expected, strict=True):
        (other,) = ask(core, request)
        assert other.token_ids == one.token_ids
        guesses = other.metrics.num_draft_tokens
        assert guesses == 0 if len(request[0]) > 64 else 0 < guesses <= 3 * 44
    assert [a.token_ids for a in ask(core, *requests)] == [a.token_ids for a in expected]


def test_b131_the_same_prompt_twice(plain, guessing):
    """All whole blocks of 64 are found again, whose last one's draft KV was made for the same next token."""
    guessing.flush_prefix_cache()
    request = (prompt_of(200), greedy(20))
    for cached in (0, 192):
        (answer,) = check(plain, guessing, [request])
        assert answer.metrics.num_accepted_tokens > 0 and answer.metrics.num_cached_tokens == cached


def test_b133_a_second_turn_and_an_edited_history(plain, guessing):
    first = prompt_of(40)
    (answer,) = check(plain, guessing, [(first, greedy(16))])
    second = [*first, *answer.token_ids, *prompt_of(9, 2)]
    edited = [*second[:20], *prompt_of(6, 5), *second[20:]]
    for history in (second, edited):
        (answer,) = check(plain, guessing, [(history, greedy(16))])
        assert answer.metrics.num_accepted_tokens > 0


def test_b134_no_client_gets_what_another_asked(plain, guessing):
    """The draft even guesses what others say: four clients, each answer as if alone."""
    requests = [([40 + i] * 5 + prompt_of(5), greedy(40)) for i in range(4)]
    solo = [ask(plain, request)[0] for request in requests]
    assert len({tuple(a.token_ids) for a in solo}) == 4
    texts = [a.token_ids for a in solo]

    def of_another(token: int, position: int, depth: int) -> int:
        return token if position % 3 else texts[position % 4][(position - 10) % 40]

    for script in (right, of_another):
        teach(guessing, requests, solo, script)
        answers = {(f"client {i}", 0): Answer() for i in range(4)}
        for i, request in enumerate(requests):
            guessing.add_request(f"client {i}", *request)
            for delta in guessing.step():
                answers[delta.request_id, 0].take(delta)
        assert [a.token_ids for a in drain(guessing, answers).values()] == texts


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_b135_budgets_and_ends_inside_a_step(plain, guessing, max_tokens):
    least = min(3, max_tokens)
    for changes in ({}, {"ignore_eos": False}, {"ignore_eos": False, "min_tokens": least, "logit_bias": {EOS: 100}}):
        for at in (0, 1, 2):
            (answer,) = check(plain, guessing, [(prompt_of(6), greedy(max_tokens, **changes))], says(EOS, at))
            assert len(answer.token_ids) <= max_tokens and EOS not in answer.token_ids[:-1]
            if "min_tokens" in changes:
                assert len(answer.token_ids) == min(least + 1, max_tokens)
