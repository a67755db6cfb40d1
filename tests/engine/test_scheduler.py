"""The scheduler against a simulated cache: every invariant after every step, whatever arrives and leaves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.kv_cache import KVCacheManager
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from tests.scheduler_model import ScheduledWorld, make_request


class AnyTraffic(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order, with pools and budgets so small that all of them collide."""

    @initialize(
        num_blocks=st.integers(2, 9), block_size=st.integers(1, 4), seqs=st.integers(1, 5), budget=st.integers(1, 9)
    )
    def start(self, num_blocks, block_size, seqs, budget):
        self.world = ScheduledWorld(num_blocks, block_size, seqs, budget)

    @rule(data=st.data())
    def arrive(self, data):
        prompt_len = data.draw(st.integers(1, self.world.max_tokens))
        max_tokens = data.draw(st.integers(1, self.world.max_tokens - prompt_len + 1))
        self.world.add(f"r{len(self.world.arrivals)}", prompt_len, max_tokens)

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def end(self, data, reason):
        self.world.end(data.draw(st.sampled_from(sorted(self.world.scheduler._requests))), reason)

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=120, stateful_step_count=25, **_SETTINGS)


@pytest.mark.slow
class TestAnyTrafficForLong(AnyTraffic.TestCase):
    settings = settings(max_examples=3000, stateful_step_count=60, **_SETTINGS)


def test_small_pools_do_force_preemption():
    """Without it, the traffic above could pass with preemption never tried."""
    world = ScheduledWorld(num_blocks=7, block_size=2, max_num_seqs=4, max_num_batched_tokens=8)
    for i in range(4):
        world.add(f"r{i}", 3, 9)
    world.drain()
    assert world.scheduler.num_preemptions > 0
    assert list(world.finished) == sorted(world.finished, key=lambda n: world.arrivals[n])


@pytest.mark.parametrize("prompt_len", [3, 4, 5, 8, 12])
def test_prompts_around_whole_blocks_take_exactly_their_blocks(prompt_len):
    world = ScheduledWorld(num_blocks=8, block_size=4, max_num_seqs=2, max_num_batched_tokens=64)
    world.add("r", prompt_len, 2)
    world.step()
    request = world.scheduler.get("r")
    assert len(request.block_ids) == -(-prompt_len // 4), "the first token's own slot is not needed yet"
    world.drain()


def test_a_prompt_that_fills_the_pool_gets_one_token():
    world = ScheduledWorld(num_blocks=4, block_size=4, max_num_seqs=2, max_num_batched_tokens=5)
    world.add("r", 12, 1)
    world.drain()
    assert len(world.finished["r"]) == 1


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(13, 1), (12, 2), (1, 13), (100, 100)])
def test_a_request_that_outgrows_the_pool_is_refused_instead_of_waiting_for_ever(prompt_len, max_tokens):
    scheduler = Scheduler(KVCacheManager(4, 4), 2, 16)
    with pytest.raises(ValueError, match="12"):
        scheduler.add(make_request("r", prompt_len, max_tokens))
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("others", [0, 1])
def test_abort_while_waiting_prefilling_decoding_and_preempted(others):
    world = ScheduledWorld(num_blocks=6, block_size=2, max_num_seqs=2, max_num_batched_tokens=4)
    for i in range(others):
        world.add(f"other{i}", 3, 6)
    for state in ("waiting", "prefilling", "decoding"):
        world.add(state, 6, 3)
        for _ in range({"waiting": 0, "prefilling": 1, "decoding": 3}[state]):
            world.step()
        world.end(state)
        assert world.scheduler.get(state) is None
    world.drain()


def test_abort_of_a_preempted_request():
    world = ScheduledWorld(num_blocks=5, block_size=2, max_num_seqs=2, max_num_batched_tokens=8)
    world.add("first", 3, 6)
    world.add("second", 3, 6)
    while not world.scheduler.num_preemptions:
        world.step()
    second = world.scheduler.get("second")
    assert second in world.scheduler.waiting and second.output_token_ids
    world.end("second")
    world.drain()
    assert list(world.finished) == ["first"]


def test_a_long_prompt_shares_its_steps_with_decodes():
    world = ScheduledWorld(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    world.add("short", 2, 12)
    world.step()
    world.add("long", 60, 2)
    for _ in range(8):
        tokens = {i.request.request_id: i.num_tokens for i in world.step().scheduled}
        assert tokens == {"short": 1, "long": 7}
    world.drain()


def test_ids_in_use_are_refused_and_unknown_ids_ignored():
    scheduler = Scheduler(KVCacheManager(4, 4), 2, 16)
    scheduler.add(make_request("r", 1, 1))
    with pytest.raises(ValueError, match="r"):
        scheduler.add(make_request("r", 1, 1))
    assert scheduler.finish("unknown", "abort") is None


def test_a_stop_id_ends_a_request_and_frees_it():
    scheduler = Scheduler(KVCacheManager(4, 4), 2, 16)
    params = SamplingParams(max_tokens=9, stop_token_ids=[7])
    scheduler.add(Request("r", [1, 2, 3], params, 0, 9, frozenset({7, 8})))
    for token, finished in ((5, []), (7, ["r"])):
        done = scheduler.update(scheduler.schedule(), [token])
        assert [r.request_id for r in done] == finished
    assert done[0].finish_reason == "stop" and done[0].stop_reason == 7
    assert not scheduler.has_unfinished and scheduler.kv_cache.usage == 0
