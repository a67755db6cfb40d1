"""Cached prefixes: who finds which block, and that answers with them are those of a cold run."""

from __future__ import annotations

from collections import defaultdict

import pytest

import engine.cache_plan
import engine.model_runner
import engine.rehearsal
import engine.replica
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_cache import KVCacheManager
from engine.launch import start_engine
from engine.request import SamplingParams
from engine.scheduler import GuessPlan
from tests.answers import Answer, ask, drain
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scheduler_model import ScheduledWorld, make_request
from tests.scripted_drafts import build_real

BLOCK = 8
SHAPE = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)


def greedy(max_tokens: int, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes)


def words(length: int, seed: int = 0) -> list[int]:
    return [(17 * i * (seed + 3) + 5 * seed) % 290 for i in range(length)]


def world(caching: bool = True, lookahead: int = 0, budget: int = 64, blocks: int = 60, seqs: int = 16):
    return ScheduledWorld(blocks, 4, seqs, budget, lookahead=lookahead, caching=caching)


def computed(world: ScheduledWorld) -> int:
    """Prompt and output tokens computed until all have ended."""
    count = 0
    while world.scheduler.has_unfinished:
        count += sum(item.num_tokens for item in world.step().scheduled)
    return count


# which blocks are found


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (19, 16)])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_seen_before_is_found_up_to_its_last_token(length, found, lookahead):
    """Of a prompt of exactly n blocks the last block is computed again: one token must be."""
    tried = world(lookahead=lookahead)
    for name in ("a", "b"):
        tried.add(name, length, 1, shared=length)
        request = tried.scheduler.get(name)
        tried.drain()
        assert request.num_cached_tokens == (found if name == "b" else 0)
    assert (tried.scheduler.kv_cache.query_tokens, tried.scheduler.kv_cache.hit_tokens) == (2 * length, found)


def test_an_answer_is_found_by_the_turn_that_continues_it():
    manager = KVCacheManager(20, 4, enable_prefix_caching=True)
    first, second = make_request("first", 6, 9), make_request("second", 1, 1)
    assert manager.admit(first)
    first.output_token_ids = [7, 8, 9, 7, 8, 9]
    assert manager.grow(first, 12)
    manager.name_blocks(first, 11)
    manager.free(first)
    second.prompt_token_ids = first.prompt_token_ids + first.output_token_ids + [1]
    assert manager.admit(second) and second.num_computed_tokens == second.num_cached_tokens == 8


def test_a_draft_wants_the_token_after_a_block_to_be_the_same():
    for lookahead, found in ((0, 8), (1, 4)):
        manager = KVCacheManager(20, 4, enable_prefix_caching=True, lookahead=lookahead)
        for tail in ([50, 51], [60, 61]):
            request = make_request("r", 1, 1)
            request.prompt_token_ids = [*range(8), *tail]
            assert manager.admit(request)
            manager.name_blocks(request, 10)
            manager.free(request)
        assert manager.hit_tokens == found


def test_without_that_rule_a_draft_would_read_what_was_made_for_another_token():
    """Else the simulated device that checks the draft's cache could pass with nothing tried."""
    tried = world(lookahead=0)
    for side in (tried.side, tried.twin):
        side.device.has_draft = True
    for name in ("a", "b"):
        tried.add(name, 9, 2, shared=8)
        if name == "a":
            tried.drain()
    with pytest.raises(AssertionError, match="draft's"):
        tried.drain()


@pytest.mark.parametrize(
    ("salts", "logprobs", "found"), [(("a", "b"), None, 0), (("a", "a"), None, 12), ((None, "a"), None, 0), ((), 0, 0)]
)
def test_salt_keeps_tenants_apart_and_prompt_logprobs_take_all_rows(salts, logprobs, found):
    tried = world()
    for index, salt in enumerate(salts or (None, None)):
        tried.add(f"r{index}", 14, 2, shared=14, cache_salt=salt, prompt_logprobs=logprobs)
        tried.drain()
    assert tried.scheduler.kv_cache.hit_tokens == found
    looked_for = 0 if logprobs is not None else 2 * 14
    assert tried.scheduler.kv_cache.query_tokens == looked_for


def test_the_block_used_longest_ago_goes_first_and_a_chain_from_its_end():
    tried = world(blocks=13)  # 12 usable
    for name, shared in (("a", 12), ("b", 0)):
        tried.add(name, 13, 1, shared=shared)
        tried.drain()
    tried.add("a2", 13, 1, shared=12)  # a is used again, so b's are older
    tried.drain()
    tried.add("c", 29, 1)  # 8 blocks: the 6 empty ones, and b's last two
    tried.drain()
    for name, like, found in (("a3", "a", 12), ("b2", "b", 4)):
        before = tried.scheduler.kv_cache.hit_tokens
        tried.add(name, 13, 1, shared=12)
        for side in (tried.side, tried.twin):
            shared = 12 if like == "a" else 0
            side.scheduler.get(name).prompt_token_ids[:] = make_request(like, 13, 1, shared).prompt_token_ids
        tried.drain()
        assert tried.scheduler.kv_cache.hit_tokens - before == found


def test_flush_forgets_everything_but_what_requests_hold():
    tried = world(budget=16)
    tried.add("a", 40, 4, shared=40)
    tried.step()
    tried.flush()
    tried.drain()
    tried.add("b", 40, 1, shared=40)
    tried.flush()
    tried.drain()
    assert tried.scheduler.kv_cache.hit_tokens == 0 and len(tried.finished) == 2


def test_after_a_flush_a_request_that_runs_on_fills_blocks_for_itself_alone():
    """Else who computes the beginning anew would go on from blocks that were begun before the flush."""
    tried = world(budget=16)
    tried.add("a", 40, 4, shared=40)
    tried.step()
    tried.flush()
    tried.drain()
    tried.add("b", 40, 1, shared=40)
    tried.drain()
    assert tried.scheduler.kv_cache.hit_tokens == 0
    tried.add("c", 40, 1, shared=40)
    tried.drain()
    assert tried.scheduler.kv_cache.hit_tokens == 36


def test_eviction_in_mid_flight_takes_no_block_that_is_in_use():
    """The prefix that a running request found is named, and still not given to those that need room."""
    tried = world(blocks=12, budget=8, seqs=3)
    tried.add("a", 17, 1, shared=16)
    tried.drain()
    tried.add("b", 18, 9, shared=16)
    for index in range(6):
        tried.add(f"c{index}", 14, 3)
    tried.drain()
    assert len(tried.finished) == 8


# prompts that begin alike at the same time


@pytest.mark.parametrize("budget", [8, 16, 64, 1024])
def test_prompts_that_begin_alike_compute_it_once_together(budget):
    tried = world(budget=budget, blocks=400)
    for index in range(8):
        tried.add(f"r{index}", 130, 1, shared=128)
    total = computed(tried)
    assert total <= 128 + 8 * 2 + (8 * 4 if budget < 16 else 0)
    assert tried.scheduler.kv_cache.hit_tokens == 8 * 130 - total


def test_without_cache_they_do_not():
    tried = world(caching=False, blocks=400)
    for index in range(4):
        tried.add(f"r{index}", 130, 1, shared=128)
    assert computed(tried) == 4 * 130


def test_n_answers_share_the_blocks_of_their_prompt():
    tried = world(blocks=60)
    for index in range(8):
        tried.add(f"r#{index}", 43, 9, shared=43)
    for _ in range(2):
        tried.step()
    assert tried.scheduler.kv_cache.num_held == 10 + 8
    tried.drain()


def test_what_was_computed_before_a_preemption_is_found_again():
    tried = world(blocks=18, seqs=4)
    for index in range(3):
        tried.add(f"r{index}", 12, 12)
    total = computed(tried)
    assert tried.scheduler.num_preemptions > 0
    assert total < 3 * 23 + tried.scheduler.num_preemptions * 14, "not the whole prompt each time"
    assert tried.scheduler.kv_cache.hit_tokens == 0, "what is found again is no one's prompt"


# fairness and priority


def test_a_short_prompt_does_not_wait_for_a_long_one():
    tried = world(budget=16, blocks=200)
    tried.add("long", 400, 1)
    tried.step()
    tried.add("short", 7, 1)
    tried.step()
    assert "short" in tried.finished and "long" not in tried.finished


def test_the_first_in_line_keeps_half_of_every_step():
    tried = world(budget=16, blocks=400, seqs=40)
    tried.add("long", 160, 1)
    for index in range(30):
        tried.add(f"short{index}", 9, 1)
    steps = 0
    while "long" not in tried.finished:
        tried.step()
        steps += 1
    assert steps <= 160 // 8


def test_the_lowest_priority_waits_and_gives_way():
    tried = world(budget=64, blocks=14, seqs=3)
    tried.add("batch", 8, 20, priority=1)
    tried.step()
    for name in ("late", "later"):
        tried.add(name, 8, 20)
    tried.add("urgent", 8, 20, priority=-1)
    requests = {name: tried.scheduler.get(name) for name in ("batch", "late", "urgent")}
    while not tried.scheduler.num_preemptions:
        tried.step()
    assert {name: request.num_preemptions for name, request in requests.items()} == {"batch": 1, "late": 0, "urgent": 0}
    tried.drain()
    assert next(iter(tried.finished)) == "urgent" and requests["urgent"].num_preemptions == 0


# answers, by a real model


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        for module in (engine.cache_plan, engine.model_runner, engine.rehearsal, engine.replica):
            patch.setattr(module, "BLOCK_SIZE", BLOCK)
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


def same(cold: EngineCore, warm: EngineCore, requests: list) -> None:
    expected = [ask(cold, one)[0] for one in requests]
    found = ask(warm, *requests)
    assert [(a.token_ids, a.text, a.end) for a in found] == [(a.token_ids, a.text, a.end) for a in expected]


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
        same(cold, warm, [(system + words(5 + index, 2 + index % 2), greedy(6))])


def test_an_edit_in_the_middle_of_the_history(cold, warm):
    """B133: turn 1, turn 2 on its prefix, then another middle."""
    history = words(60, 4)
    for prompt in (history, history + words(9, 5), history[:30] + words(30, 6), history[:32] + words(1, 7)):
        same(cold, warm, [(prompt, greedy(8))])


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


def test_plans_that_verify_more_than_they_know_do_not_touch_shared_blocks():
    tried = world(lookahead=1, blocks=30)
    for index in range(6):
        tried.add(f"r{index}", 18, 9, shared=16)
    tried.drain(GuessPlan(4, 4), ahead=True)
    assert len(tried.finished) == 6 and tried.scheduler.kv_cache.hit_tokens > 0
