"""The scheduler against a simulated cache: every invariant after every step, whatever arrives and leaves."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.kv_cache import KVCacheManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import GuessPlan, Scheduler
from tests.scheduler_model import ScheduledWorld, make_request, token_at


def plans() -> st.SearchStrategy[GuessPlan]:
    """Also those that guess without verifying, or verify what an earlier step guessed."""
    return st.builds(GuessPlan, st.integers(0, 4), st.integers(0, 4))


class AnyTraffic(RuleBasedStateMachine):
    """Arrivals, aborts and steps in any order, with pools and budgets so small that all of them collide."""

    @initialize(
        num_blocks=st.integers(2, 9),
        block_size=st.integers(1, 4),
        seqs=st.integers(1, 5),
        budget=st.integers(1, 9),
        replays=st.booleans(),
        lookahead=st.integers(0, 1),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, num_blocks, block_size, seqs, budget, replays, lookahead, caching):
        self.world = ScheduledWorld(num_blocks, block_size, seqs, budget, replays, lookahead, caching)

    @rule(data=st.data())
    def arrive(self, data):
        prompt_len = data.draw(st.integers(1, self.world.max_tokens))
        max_tokens = data.draw(st.integers(1, self.world.max_tokens - prompt_len + 1))
        shared = data.draw(st.integers(0, prompt_len))
        params = {"priority": data.draw(st.sampled_from([0, 0, 0, 1, -1]))}
        params["cache_salt"] = data.draw(st.sampled_from([None, None, None, "salt"]))
        params["prompt_logprobs"] = data.draw(st.sampled_from([None, None, None, None, 0]))
        self.world.add(f"r{len(self.world.arrivals)}", prompt_len, max_tokens, shared, **params)

    @precondition(lambda self: self.world.scheduler.has_unfinished)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "stop"]))
    def end(self, data, reason):
        self.world.end(data.draw(st.sampled_from(sorted(self.world.scheduler._requests))), reason)

    @rule(count=st.integers(1, 8), plan=plans(), ahead=st.booleans(), prefill_limit=st.none() | st.integers(0, 9))
    def step(self, count, plan, ahead, prefill_limit):
        for _ in range(count):
            self.world.step(plan, ahead, prefill_limit)

    @rule()
    def flush(self):
        self.world.flush()

    @rule()
    def read(self):
        self.world.read(0)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain(GuessPlan(2, 2), ahead=True)


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


@pytest.mark.parametrize("replays", [False, True])
def test_guesses_are_accepted_ahead_of_the_host_in_small_pools_too(replays):
    """Without any of it, the traffic above could pass with nothing tried."""
    world = ScheduledWorld(num_blocks=9, block_size=2, max_num_seqs=4, max_num_batched_tokens=16, replays=replays)
    for i in range(4):
        world.add(f"r{i}", 3, 9)
    steps = 0
    while world.scheduler.has_unfinished:
        world.step(GuessPlan(3, 3), ahead=True)
        steps += 1
    world.drain()
    assert world.scheduler.num_preemptions > 0 and world.side.device.num_accepted > 2
    assert len(world.finished) == 4
    assert (world.ahead > 3) is replays


def guess_right(world: ScheduledWorld) -> None:
    world.side.device._guess = world.twin.device._guess = lambda request, position, count: [
        token_at(request.request_id, p) for p in range(position + 1, position + 1 + count)
    ]


@pytest.mark.parametrize("block_size", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", range(8, 22))
def test_right_guesses_in_flight_where_blocks_run_out(num_blocks, block_size):
    """A request is four places further on the device than the host knows, and has a slot there or gives way."""
    for prompt_len in (1, 2, 3):
        world = ScheduledWorld(num_blocks, block_size, max_num_seqs=3, max_num_batched_tokens=32)
        guess_right(world)
        for i in range(3):
            max_tokens = min(14 - i, world.max_tokens - prompt_len + 1)
            world.add(f"r{i}", prompt_len, max_tokens)
        world.drain(GuessPlan(3, 3), ahead=True)
        assert sorted(world.finished) == ["r0", "r1", "r2"]


def test_right_guesses_shorten_the_run_to_as_few_steps_as_they_can():
    world = ScheduledWorld(num_blocks=20, block_size=4, max_num_seqs=1, max_num_batched_tokens=16)
    guess_right(world)
    world.add("r", 3, 13)
    counts = []
    while world.scheduler.has_unfinished:
        (item,) = world.step(GuessPlan(3, 3)).scheduled
        counts.append(item.num_guesses)
    assert counts == [0, 3, 3, 3], "one token, then four a step"
    request = item.request
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (9, 9)


def test_guesses_that_no_answer_can_use_are_not_verified():
    """The last token that max_tokens allows needs no guess of the one after."""
    world = ScheduledWorld(num_blocks=20, block_size=4, max_num_seqs=1, max_num_batched_tokens=16)
    world.side.device._guess = world.twin.device._guess = lambda request, position, count: [5] * count
    world.add("r", 3, 5)
    found = []
    while world.scheduler.has_unfinished:
        found += [item.num_guesses for item in world.step(GuessPlan(4, 4)).scheduled]
    assert found == [0, 3, 2, 1, 0]


def test_guesses_share_the_budget_with_prompts():
    """Two that decode would else take all eight rows of every step until they end."""
    world = ScheduledWorld(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    world.add("a", 2, 40)
    world.add("b", 2, 40)
    for _ in range(2):
        world.step(GuessPlan(3, 3))
    world.add("long", 20, 2)
    for _ in range(8):
        world.step(GuessPlan(3, 3))
    assert "long" in world.finished or world.scheduler.get("long").output_token_ids


@pytest.mark.parametrize(("num_blocks", "held_up"), [(4, [False, True, True]), (20, [False, False, False])])
def test_who_waits_for_blocks_is_told_from_who_waits_for_a_seat(num_blocks, held_up):
    """Two seats for three requests: in a small cache the second waits for blocks, else the third for a seat."""
    world = ScheduledWorld(num_blocks, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, caching=False)
    seen = []
    for name in ("a", "b", "c"):
        world.add(name, 8, 5)
        world.step()
        seen.append(world.scheduler.is_held_up)
    assert seen == held_up and world.scheduler.waiting
    world.drain()
    assert not world.scheduler.is_held_up


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


def test_arrivals_at_twice_what_can_be_served():
    """B113: a pool that is always full, some requests pushed out again and again; answers keep ending, and all do."""
    rng = random.Random(0)
    world = ScheduledWorld(num_blocks=12, block_size=4, max_num_seqs=6, max_num_batched_tokens=16)
    last_end = 0
    for step in range(250):
        if rng.random() < 0.7:
            world.add(f"r{step}", rng.randint(1, 24), rng.randint(1, 16), shared=rng.choice([0, 8]))
        ended = len(world.finished)
        world.step(GuessPlan(2, 2), ahead=True)
        last_end = step if len(world.finished) > ended else last_end
        assert step - last_end < 40
    assert len(world.scheduler.waiting) > len(world.arrivals) / 3 and world.scheduler.num_preemptions > 10
    world.drain(GuessPlan(2, 2), ahead=True)
    assert len(world.finished) == len(world.arrivals)


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
    request = scheduler.get("r")
    for token, finished in ((5, False), (7, True)):
        scheduler.update(scheduler.schedule(), [[token]])
        assert request.finished is finished
    assert request.finish_reason == "stop" and request.stop_reason == 7 and request.block_ids == []
    assert not scheduler.has_unfinished and scheduler.kv_cache.usage == 0
