"""Steps launched before the tokens of the last are read: the same answers, whatever arrives, ends and collides."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.core
from engine.config import EngineConfig
from engine.core import EngineCore, Replica
from engine.launch import start_engine
from engine.request import Request, SamplingParams
from engine.scheduler import SchedulerOutput
from engine.step_output import ModelRunnerOutput
from tests.answers import Answer, ask, drain
from tests.checkpoints import SMALL, build_checkpoint
from tests.scheduler_model import hash_of

END = 7


class LazyOutput(ModelRunnerOutput):
    """Tokens that exist on the device alone until they are read."""

    def __init__(self, tokens: list[list[int]]):
        super().__init__()
        self._tokens = tokens

    def read(self) -> list[list[int]]:
        self.token_ids = self._tokens
        return self.token_ids


class SimulatedDevice:
    """A runner whose model says a token by name and place, over a cache that remembers who wrote which slot."""

    overlaps = False

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache: dict[tuple[int, int], tuple] = {}
        self.last: dict[Request, int] = {}
        self.num_extra = 0
        self.lost: str | None = None

    def failure(self) -> str | None:
        return self.lost

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sampled, last = [], {}
        for item in output.scheduled:
            request = item.request
            assert not request.finished
            tokens = request.token_ids(item.start, item.stop)
            if request.num_pending:
                tokens = [*tokens, self.last[request]]
            assert len(tokens) == item.num_tokens
            for position, token in zip(range(item.start, item.stop), tokens, strict=True):
                self.cache[self._slot(request, position)] = (request, position, token)
            for position in range(item.stop):
                assert self.cache[self._slot(request, position)][:2] == (request, position)
            if item.samples:
                last[request] = token_of(request.request_id, item.stop)
                sampled.append([last[request]])
        self.last = last
        return LazyOutput(sampled)

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size


def token_of(name: str, position: int) -> int:
    """One in nine ends an answer."""
    value = random.Random(hash_of(name) * 1009 + position).randrange(9)
    return END if value == 0 else 1000 + 10 * position + value


class World:
    """A replica on a simulated device, and what came of every request."""

    def __init__(self, overlap: bool, num_blocks: int, block_size: int, seqs: int, budget: int):
        config = SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=budget)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.core, "BLOCK_SIZE", block_size)
            self.replica = Replica(config, SimulatedDevice(num_blocks, block_size), overlap)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.finish: list = []
        self.new: list[Request] = []
        self.after: dict[str, int] = {}

    def add(self, name: str, prompt_len: int, max_tokens: int, stop_after: int, penalty: bool) -> None:
        """stop_after: tokens after which the caller ends it, as a stop string does; 0 = never."""
        params = SamplingParams(max_tokens=max_tokens, presence_penalty=0.5 if penalty else 0.0)
        self.new.append(Request(name, list(range(prompt_len)), params, 0, max_tokens, frozenset({END})))
        self.tokens[name], self.after[name] = [], stop_after

    def abort(self, name: str) -> None:
        if name not in self.ended:
            self.ended[name] = "abort"
            self.finish.append([name, "abort", None])

    def step(self) -> None:
        new, finish, self.new, self.finish = self.new, self.finish, [], []
        self.replica.apply(new, [])
        self.replica.apply([], finish)
        output, result = self.replica.step()
        tokens = iter(result.token_ids)
        for item in output.scheduled:
            if item.samples:
                (token,) = next(tokens)
                self._take(item.request, token)
        assert next(tokens, None) is None

    def _take(self, request: Request, token: int) -> None:
        name = request.request_id
        assert name not in self.ended, "nothing comes after the end"
        self.tokens[name].append(token)
        if request.finished:
            self.ended[name] = request.finish_reason
        elif len(self.tokens[name]) == self.after[name]:
            self.ended[name] = "stop string"
            self.finish.append([name, "stop", "x"])

    def drain(self) -> None:
        for _ in range(3000):
            if not (self.new or self.finish or self.replica.has_unfinished):
                break
            self.step()
        assert not self.replica.has_unfinished and self.replica.scheduler.kv_cache.usage == 0.0


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_overlap_changes_no_answer(data):
    shape = [data.draw(st.integers(*bounds)) for bounds in ((3, 9), (1, 4), (1, 5), (1, 9))]
    worlds = [World(overlap, *shape) for overlap in (False, True)]
    most = worlds[0].replica.scheduler.kv_cache.max_tokens
    names: list[str] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort"]))
        if action == "add":
            prompt_len = data.draw(st.integers(1, most))
            max_tokens = data.draw(st.integers(1, most - prompt_len + 1))
            options = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5)) == 0
            for world in worlds:
                world.add(f"r{len(names)}", prompt_len, max_tokens, *options)
            names.append(f"r{len(names)}")
        elif action == "abort" and names:
            name = data.draw(st.sampled_from(names))
            for world in worlds:
                world.abort(name)
        else:
            for world in worlds:
                world.step()
    for world in worlds:
        world.drain()
    plain, ahead = worlds
    assert set(plain.ended) == set(ahead.ended) == set(names)
    for name in names:
        if "abort" in (plain.ended[name], ahead.ended[name]):
            shorter = min(len(plain.tokens[name]), len(ahead.tokens[name]))
            assert plain.tokens[name][:shorter] == ahead.tokens[name][:shorter]
        else:
            assert plain.tokens[name] == ahead.tokens[name] and plain.ended[name] == ahead.ended[name]


def test_steps_do_run_ahead_and_small_pools_do_preempt():
    """Without either, the test above could pass with nothing tried."""
    world = World(True, 7, 2, 4, 8)
    for i in range(4):
        world.add(f"p{i}", 3, 9, 0, False)
    depth = 0
    for _ in range(60):
        world.step()
        depth = max(depth, len(world.replica._in_flight))
    assert depth == 1 and world.replica.scheduler.num_preemptions > 0 and len(world.ended) == 4


def test_a_penalty_keeps_steps_from_running_ahead():
    world = World(True, 20, 4, 4, 16)
    world.add("p", 3, 9, 0, True)
    for _ in range(3):
        world.step()
        assert not world.replica._in_flight
    world.drain()
    assert not world.replica.scheduler.needs_known_tokens


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> EngineCore:
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("overlap"), SMALL)
    return start_engine(EngineConfig(str(checkpoint), device="cpu", dtype="float32", num_threads=1, max_num_seqs=5))[0]


def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    found = []
    for i in range(9):
        changes = [{}, {"top_k": 9}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"min_tokens": 4}, {"logprobs": 2}][
            i % 6
        ]
        temperature = 0.0 if i % 2 else 1.0
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=rng.randint(1, 12), **changes)
        found.append(([rng.randrange(300) for _ in range(rng.randint(1, 20))], params))
    return found


@pytest.mark.parametrize("penalties", [False, True])
def test_the_engine_answers_the_same_ahead_of_its_tokens(core, penalties):
    some = [r for r in requests() if penalties or not r[1].has_penalties]
    core.replica.overlap = False
    expected = ask(core, *some)
    core.replica.overlap = True
    for one, other in zip(expected, ask(core, *some), strict=True):
        assert (one.token_ids, one.text, one.end) == (other.token_ids, other.text, other.end)
        assert len(one.logprobs) == len(other.logprobs), "whose last bits depend on the batch"
    assert not core.has_unfinished() and core.stats().kv_cache_usage == 0.0


def test_a_stop_string_and_an_abort_ahead_of_their_tokens(core):
    prompt, params = [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    core.replica.overlap = False
    text = ask(core, (prompt, params))[0].text
    stopped = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop=text[4:7])
    expected = ask(core, (prompt, stopped), (prompt, params))
    core.replica.overlap = True
    assert ask(core, (prompt, stopped), (prompt, params)) == expected
    core.add_request("same", prompt, params)
    for _ in range(4):
        core.step()
    core.abort_request("same")
    core.add_request("same", prompt, stopped)
    answer = Answer()
    for delta in core.step():
        assert delta.finish_reason == "abort"
    assert drain(core, {("same", 0): answer})["same", 0] == expected[0]
