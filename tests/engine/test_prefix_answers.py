"""Cached prefixes by a real model: answers with them are those of a cold run."""

from __future__ import annotations

from collections import defaultdict

import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.sampling_params import SamplingParams
from tests.answers import Answer, ask, drain
from tests.blocks import set_block_size
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scripted_drafts import build_real

BLOCK = 8
SHAPE = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes)


def words(length: int, seed: int = 0) -> list[int]:
    return [(17 * i * (seed + 3) + 5 * seed) % 290 for i in range(length)]


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, BLOCK)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("prefix") / "model", SMALL)


def build(checkpoint, **settings) -> EngineCore:
    settings = {"max_model_len": 256, "max_num_seqs": 8} | settings
    return start_engine(EngineConfig(str(checkpoint), device="cpu", dtype="float32", num_threads=1, **settings))[0]


@pytest.fixture(scope="module")
def cold(checkpoint) -> EngineCore:
    return build(checkpoint, enable_prefix_caching=False)


@pytest.fixture(scope="module", params=["plain", "draft"])
def warm(request, checkpoint, tmp_path_factory) -> EngineCore:
    """Small, so that blocks are evicted and requests preempted too."""
    block_bytes = 4 * SMALL.num_hidden_layers * BLOCK * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)
    small = {"max_num_seqs": 5, "max_num_batched_tokens": 24, "kv_cache_memory_gb": 48.5 * block_bytes / 2**30}
    if request.param == "plain":
        return build(checkpoint, **small)
    small["kv_cache_memory_gb"] *= 2  # the draft's take as much again
    draft = write_draft(tmp_path_factory.mktemp("draft"), SHAPE, seed=9, layer_ids=(0, 1, 2))
    return build_real(checkpoint, draft, 3, **small, max_model_len=256)


def same(cold: EngineCore, warm: EngineCore, requests: list) -> list[Answer]:
    expected = [ask(cold, one)[0] for one in requests]
    found = ask(warm, *requests)
    assert [(a.token_ids, a.text, a.end) for a in found] == [(a.token_ids, a.text, a.end) for a in expected]
    return found


@pytest.mark.parametrize("length", [7, 8, 9, 16, 63, 64, 65])
def test_a_prompt_and_the_turns_after_it_answer_as_in_a_cold_run(cold, warm, length):
    prompt = words(length, length)
    for turn in range(3):
        before = warm.replica.scheduler.kv_cache.hit_tokens
        same(cold, warm, [(prompt, greedy(9)), (prompt, SamplingParams(temperature=1.0, seed=turn, max_tokens=9))])
        (answer,) = ask(cold, (prompt, greedy(9)))
        prompt = prompt + answer.token_ids + words(3, turn)
        if turn:
            assert warm.replica.scheduler.kv_cache.hit_tokens - before >= len(prompt) - 12 - 2 * BLOCK


def test_b120_two_prompts_that_share_a_system_message_alternating(cold, warm):
    system = words(40, 1)
    for index in range(10):
        assert same(cold, warm, [(system + words(5 + index, 2 + index % 2), greedy(6))])


def test_an_edit_in_the_middle_of_the_history(cold, warm):
    """B133: turn 1, turn 2 on its prefix, then another middle."""
    history = words(60, 4)
    for prompt in (history, history + words(9, 5), history[:30] + words(30, 6), history[:32] + words(1, 7)):
        assert same(cold, warm, [(prompt, greedy(8))])


def test_bursts_of_prompts_that_begin_alike_with_aborts(cold, warm):
    """B115: whatever came and went, free and cached and held blocks are all there are."""
    shared = words(33, 8)
    requests = [(shared[: 8 * (i % 5)] + words(4 + i, i), greedy(3 + i % 7)) for i in range(12)]
    for i in range(4):
        warm.add_request(f"gone{i}", shared + words(i, 3), greedy(40))
    for i in range(4):
        warm.step()
        warm.abort_request(f"gone{i}")
    same(cold, warm, requests)
    kv_cache = warm.replica.scheduler.kv_cache
    assert kv_cache.num_held == 0 and kv_cache.num_free + kv_cache.num_cached == kv_cache.pool.num_usable


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("steps_before", [0, 1, 6])
def test_a_step_that_is_interrupted_leaves_nothing_to_be_found(cold, warm, goes_on, steps_before, monkeypatch):
    """A second Ctrl-C takes effect amid a step, whose blocks were to be found from then on."""
    prompt, other = words(100, 20 + steps_before), words(100, 20 + steps_before)[:70] + words(9, 3)
    expected = {name: ask(cold, (ids, greedy(9)))[0] for name, ids in (("one", prompt), ("two", other))}
    warm.flush_prefix_cache()
    warm.add_request("one", prompt, greedy(9))
    warm.add_request("two", other, greedy(9))
    answers = defaultdict(Answer)
    for _ in range(steps_before):
        for delta in warm.step():
            answers[delta.request_id, delta.index].take(delta)

    def interrupted(output):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(warm.replica.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            warm.step()
    if not goes_on:
        for name in ("one", "two"):
            warm.abort_request(name)
        drain(warm, answers)
        answers = {(name, 0): ask(warm, (ids, greedy(9)))[0] for name, ids in (("one", prompt), ("two", other))}
    else:
        drain(warm, answers)
    for name, answer in expected.items():
        assert answers[name, 0].token_ids == answer.token_ids
    assert warm.stats().kv_cache_usage == 0.0


def test_flush_makes_the_next_run_a_cold_one(cold, warm):
    prompt = words(50, 9)
    same(cold, warm, [(prompt, greedy(4))])
    warm.flush_prefix_cache()
    before = warm.replica.scheduler.kv_cache.hit_tokens
    same(cold, warm, [(prompt, greedy(4))])
    assert warm.replica.scheduler.kv_cache.hit_tokens == before


def test_prompt_logprobs_are_whole_after_a_hit(cold, warm):
    prompt = words(41, 10)
    for params in (greedy(3), greedy(3, prompt_logprobs=1)):
        expected, found = ask(cold, (prompt, params))[0], ask(warm, (prompt, params))[0]
        assert found.token_ids == expected.token_ids
    assert len(found.prompt_logprobs) == len(prompt)
    for ours, theirs in zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert ours.keys() == theirs.keys()


def test_n_answers_of_a_cached_prompt(cold, warm):
    params = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=7)
    answers = []
    for core in (cold, warm, warm):
        core.add_request("many", words(44, 11), params)
        answers.append({key: answer.token_ids for key, answer in drain(core).items()})
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 4


def test_guesses_are_accepted_after_a_hit_as_often_as_in_a_cold_run(checkpoint, tmp_path):
    """B131, B123: nothing of the draft's is stale, and all but the last block is found."""
    draft = write_draft(tmp_path, SHAPE, seed=9, layer_ids=(0, 1, 2))
    core = build_real(checkpoint, draft, 3, max_num_seqs=2, max_model_len=256)
    prompt, told = words(200, 12), []
    for _ in range(3):
        before = core.replica.scheduler.kv_cache.hit_tokens
        (answer,) = ask(core, (prompt, greedy(20)))
        hits = core.replica.scheduler.kv_cache.hit_tokens - before
        told.append((answer.token_ids, answer.metrics.num_draft_tokens, answer.metrics.num_accepted_tokens))
    assert told[0] == told[1] == told[2] and hits >= 200 - 2 * BLOCK


def test_an_end_that_an_interrupted_step_was_to_tell_is_told_by_the_next(checkpoint, monkeypatch):
    core = build(checkpoint)
    for name in ("stays", "ends"):
        core.add_request(name, words(5), greedy(5))
    core.step()
    core.abort_request("ends")

    def interrupted(output):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(core.replica.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert drain(core)["ends", 0].end == ("abort", None)
