"""Steps launched before the tokens of the last are read: the same answers, whatever arrives, ends and collides."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.replica
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.replica import Replica
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import NO_GUESSES, GuessPlan, SchedulerOutput
from engine.step_output import ModelRunnerOutput
from tests.answers import Answer, ask, drain
from tests.checkpoints import SMALL, build_checkpoint
from tests.scheduler_model import hash_of
from tests.simulated_device import SimulatedDevice

END = 7


class LazyOutput(ModelRunnerOutput):
    """Tokens that exist on the device alone until they are read."""

    def __init__(self, tokens: list[list[int]], guesses: list[list[int]]):
        super().__init__()
        self._told = tokens, guesses

    def read(self) -> list[list[int]]:
        self.token_ids, self.guess_ids = self._told
        return self.token_ids


class Runner:
    """A runner on a simulated device, whose model may end answers."""

    overlaps = False

    def __init__(self, num_blocks: int, block_size: int, replays: bool = True):
        self.num_blocks, self.num_guesses, self.num_host_blocks = num_blocks, 4, 6
        self.device = SimulatedDevice(block_size, token_of, replays, end=END)
        self.lost: str | None = None

    def failure(self) -> str | None:
        return self.lost

    def replays(self, num_requests: int) -> bool:
        return self.device.replays

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        return LazyOutput(*self.device.run(output))


def token_of(name: str, position: int) -> int:
    """One in nine ends an answer."""
    value = random.Random(hash_of(name) * 1009 + position).randrange(9)
    return END if value == 0 else 1000 + 10 * position + value


class World:
    """A replica on a simulated device, and what came of every request."""

    def __init__(self, overlap: bool, num_blocks: int, block_size: int, seqs: int, budget: int, replays: bool = True):
        config = SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=budget, enable_prefix_caching=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.replica, "BLOCK_SIZE", block_size)
            self.replica = Replica(config, Runner(num_blocks, block_size, replays), overlap)
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.finish: list = []
        self.new: list[Request] = []
        self.after: dict[str, int] = {}
        self.num_ahead = 0

    def add(self, name: str, prompt_len: int, max_tokens: int, stop_after: int, penalty: bool) -> None:
        """stop_after: tokens after which the caller ends it, as a stop string does; 0 = never."""
        params = SamplingParams(max_tokens=max_tokens, presence_penalty=0.5 if penalty else 0.0)
        self.new.append(Request(name, list(range(prompt_len)), params, 0, max_tokens, frozenset({END})))
        self.tokens[name], self.after[name] = [], stop_after

    def abort(self, name: str) -> None:
        if name not in self.ended:
            self.ended[name] = "abort"
            self.finish.append([name, "abort", None])

    def step(self, plan: GuessPlan = NO_GUESSES) -> None:
        new, finish, self.new, self.finish = self.new, self.finish, [], []
        self.replica.apply(new, [])
        self.replica.apply([], finish)
        unread, launched = len(self.replica._in_flight), self.replica.num_steps
        output, result = self.replica.step(plan)
        self.num_ahead += unread * (self.replica.num_steps - launched)
        sampling = [item.request for item in output.scheduled if item.samples]
        assert len(sampling) == len(result.token_ids)
        for request in sampling:
            self._take(request)

    def _take(self, request: Request) -> None:
        """As the output processor does: what is new of a request's own tokens, up to where the caller ends it."""
        name = request.request_id
        assert name not in self.ended, "nothing comes after the end"
        known, told = len(self.tokens[name]), request.output_token_ids
        assert len(told) > known, "a step that samples commits"
        self.tokens[name] = told[: self.after[name] or None]
        if len(self.tokens[name]) == self.after[name] and not (request.finished and len(told) == self.after[name]):
            self.ended[name] = "stop string"
            if not request.finished:
                self.finish.append([name, "stop", "x"])
        elif request.finished:
            self.ended[name] = request.finish_reason

    def drain(self, plan: GuessPlan = NO_GUESSES) -> None:
        for _ in range(3000):
            if not (self.new or self.finish or self.replica.has_unfinished):
                break
            self.step(plan)
        assert not self.replica.has_unfinished and self.replica.scheduler.kv_cache.usage == 0.0


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_overlap_changes_no_answer(data):
    shape = [data.draw(st.integers(*bounds)) for bounds in ((3, 9), (1, 4), (1, 5), (1, 9))]
    worlds = [World(False, *shape), World(True, *shape)]
    check_answers(data, worlds, [NO_GUESSES, NO_GUESSES])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_guesses_change_no_answer(data):
    """Plain steps, and steps with guesses: one after the other, ahead in graphs, and ahead where steps are eager."""
    shape = [data.draw(st.integers(*bounds)) for bounds in ((3, 9), (1, 4), (1, 5), (1, 9))]
    plan = GuessPlan(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)))
    worlds = [World(False, *shape), World(False, *shape), World(True, *shape), World(True, *shape, replays=False)]
    check_answers(data, worlds, [NO_GUESSES, plan, plan, plan])


def check_answers(data, worlds: list[World], plans: list[GuessPlan]) -> None:
    """The same traffic for all of them; the answers are those of the first."""
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
            for world, plan in zip(worlds, plans, strict=True):
                world.step(plan)
    for world, plan in zip(worlds, plans, strict=True):
        world.drain(plan)
        check_same(worlds[0], world, names)


def check_same(plain: World, other: World, names: list[str]) -> None:
    assert set(plain.ended) == set(other.ended) == set(names)
    for name in names:
        if "abort" in (plain.ended[name], other.ended[name]):
            shorter = min(len(plain.tokens[name]), len(other.tokens[name]))
            assert plain.tokens[name][:shorter] == other.tokens[name][:shorter]
        else:
            assert plain.tokens[name] == other.tokens[name] and plain.ended[name] == other.ended[name]


@pytest.mark.parametrize(("overlap", "replays"), [(False, True), (True, True), (True, False)])
def test_guesses_are_accepted_in_few_steps_and_ahead_only_in_graphs(overlap, replays):
    """Without it, the test above could pass with nothing tried."""
    worlds = [World(overlap, 200, 4, 12, 64, replays) for _ in range(2)]
    for world, plan in zip(worlds, (NO_GUESSES, GuessPlan(3, 3)), strict=True):
        for i in range(12):
            world.add(f"g{i}", 3, 30, 0, False)
        world.drain(plan)
    plain, guessing = worlds
    assert guessing.tokens == plain.tokens
    assert guessing.replica.runner.device.num_accepted > 10 > plain.replica.runner.device.num_accepted == 0
    assert guessing.replica.num_steps < plain.replica.num_steps
    assert (plain.num_ahead > 3) is overlap
    assert (guessing.num_ahead > 3) is (overlap and replays)


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


def test_a_step_interrupted_ahead_of_the_tokens_of_another(core, monkeypatch):
    """Those are read before anything is launched: what the interrupted step left on the device is not known."""
    core.replica.overlap = False
    expected = ask(core, *requests())
    core.replica.overlap = True
    for i, (prompt, params) in enumerate(requests()):
        core.add_request(f"q{i}", prompt, params)
    answers, execute, count = defaultdict(Answer), core.replica.runner.execute, 0

    def sometimes_interrupted(output):
        nonlocal count
        count += 1
        result = execute(output)
        if count % 4 == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(core.replica.runner, "execute", sometimes_interrupted)
    for _ in range(200):
        try:
            for delta in core.step():
                answers[delta.request_id, delta.index].take(delta)
        except KeyboardInterrupt:
            assert not core.replica.scheduler.running
    assert [answers[f"q{i}", 0].token_ids for i in range(len(expected))] == [a.token_ids for a in expected]
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
