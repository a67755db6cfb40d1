"""Cached prefixes: who finds which block, by the scheduler alone; and who comes first."""

from __future__ import annotations

import pytest

from engine.kv_cache import KVCacheManager
from engine.scheduler import GuessPlan
from tests.scheduler_model import ScheduledWorld, make_request


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


def test_plans_that_verify_more_than_they_know_do_not_touch_shared_blocks():
    tried = world(lookahead=1, blocks=30)
    for index in range(6):
        tried.add(f"r{index}", 18, 9, shared=16)
    tried.drain(GuessPlan(4, 4), ahead=True)
    assert len(tried.finished) == 6 and tried.scheduler.kv_cache.hit_tokens > 0
