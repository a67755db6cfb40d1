"""Replayed decode steps: the same tokens as without, whatever the bucket, lengths, padding and sampling; a budget."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch

from engine.comm.collectives import agree_on_minimum
from engine.comm.meter import MOE_COMBINE, CommMeter
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.graph import GraphRunner, capture_obstacle
from engine.launch import start_engine
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.request import SamplingParams
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.gloo_ranks import on_ranks
from tests.rerun import DeviceLengths, RerunRecorder, record


def runner_of(sizes: list[int], taken: list[int], budget: int) -> GraphRunner:
    def step(inputs):
        return torch.zeros(inputs.num_rows, 5), torch.zeros(inputs.num_rows)

    runner = GraphRunner(RerunRecorder(taken), step, lambda *_: None, budget)
    runner.capture_all([SimpleNamespace(num_rows=size) for size in sizes])
    return runner


def test_each_number_of_requests_gets_the_smallest_bucket():
    runner = runner_of([1, 2, 4, 6], [], 0)
    chosen = [runner.choose(n).inputs.num_rows for n in range(1, 7)]
    assert chosen == [1, 2, 4, 4, 6, 6] and runner.choose(7) is None and runner.choose(0) is None


def test_buckets_over_the_budget_are_given_up_and_said(caplog):
    with caplog.at_level(logging.INFO):
        runner = runner_of([1, 2, 4], [100, 0, 40, 1, 30, 9], 80)
    assert [n and runner.choose(n) and runner.choose(n).inputs.num_rows for n in (1, 2, 3, 4)] == [1, 2, None, None]
    assert runner.num_bytes == 80
    assert "4 rows" in caplog.text and "graph_memory_gb" in caplog.text and "2 decode graphs" in caplog.text


def test_no_budget_no_graph():
    assert runner_of([1, 2], [5, 5, 5, 5], 0).choose(1) is None


def test_a_capture_that_fails_leaves_no_graph():
    """One that lived on would keep NCCL from ending, and so the engine from saying why it did not start."""

    class OutOfMemory(RerunRecorder):
        def memory(self) -> int:
            if len(self.graphs) == 4:
                raise MemoryError("no room")
            return super().memory()

    runner = GraphRunner(OutOfMemory(), lambda i: (torch.zeros(i.num_rows, 5), torch.zeros(1)), lambda *_: None, 0)
    with pytest.raises(MemoryError):
        runner.capture_all([SimpleNamespace(num_rows=size) for size in (1, 2, 4)])
    assert runner.captured == {} and runner.choose(1) is None


ROOM = (((100, 0), (40, 1), (30, 9)), ((90, 0), (50, 2), (20, 8)), ((20, 0), (60, 9), (4, 4)))
"""For each of three ranks, what step and draw of buckets 4, 2 and 1 take: none could keep more than some."""


def kept_on_ranks(parallel: ParallelState) -> tuple[list[int], int, list[int]]:
    """The buckets this rank keeps, what it believes they take, and when it entered captures."""
    recorder = RerunRecorder([size for bucket in ROOM[parallel.rank] for size in bucket])
    agreed: list[int] = []

    def agree(value: int) -> int:
        agreed.append(value)
        return agree_on_minimum(value, parallel)

    def step(inputs):
        return torch.zeros(inputs.num_rows, 5), torch.zeros(inputs.num_rows)

    runner = GraphRunner(recorder, step, lambda *_: None, 92, agree=agree)
    runner.capture_all([SimpleNamespace(num_rows=size) for size in (1, 2, 4)])
    return sorted(runner.captured), runner.num_bytes, agreed


def test_ranks_keep_the_same_buckets_though_one_has_less_memory(tmp_path):
    """Alone, rank 0 would keep 2 and 1, rank 1 would keep 4, rank 2 would keep 4 and 2."""
    outcomes = on_ranks(3, tmp_path, kept_on_ranks)
    assert [kept for kept, _, _ in outcomes] == [[2]] * 3
    assert [taken for _, taken, _ in outcomes] == [69] * 3, "what the bucket takes where it takes most"
    assert all(agreed[0::2] == [0, 0, 0] for _, _, agreed in outcomes), "no rank captures before the others"


def capture_on_ranks(parallel: ParallelState, checkpoint: str) -> dict:
    """A model's own captures, of which the larger ones do not fit on rank 1; then a step, eager and replayed."""
    config = EngineConfig(
        checkpoint, tp=2, ep=parallel.ep, device="cpu", dtype="float32", num_threads=1, max_num_seqs=4,
        kv_cache_memory_gb=0.01, graph_memory_gb=0.01,
    )  # fmt: skip
    runner = ModelRunner(config, ModelFiles.read(config), parallel)
    core = EngineCore(config, ModelFiles.read(config), runner)
    request = ([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5))
    before = dict(parallel.meter.rounds)
    eager = ask(core, request)[0].token_ids
    sent = {kind: count - before[kind] for kind, count in parallel.meter.rounds.items()}
    runner.model.backend = DeviceLengths()
    recorder = RerunRecorder([2**30, 0] if parallel.rank else [])
    runner.capture(recorder)
    tokens = ask(core, request)[0].token_ids
    before = dict(parallel.meter.rounds)
    for graph in recorder.graphs:  # a graph runs no Python
        graph.replay = lambda: None
    ask(core, request)
    replayed = {kind: count - before[kind] for kind, count in parallel.meter.rounds.items()}
    captured = sorted(runner.graphs.captured)
    runner.close()
    return {"tokens": [eager, tokens], "sent": [sent, replayed], "captured": captured, "open": runner.graphs}


def test_ranks_capture_replay_and_count_alike(tmp_path, checkpoint):
    first, second = on_ranks(2, tmp_path, capture_on_ranks, str(checkpoint))
    assert first == second
    assert first["captured"] == [1, 2] and first["open"] is None
    assert first["tokens"][0] == first["tokens"][1]
    assert first["sent"][0] == first["sent"][1] and first["sent"][0]["attention_reduce"] > 0


def test_what_cannot_be_captured_is_named():
    able, unable = SimpleNamespace(is_capturable=True), SimpleNamespace()
    assert capture_obstacle({"attention": able, "kernels": able}) is None
    assert capture_obstacle({"attention": able, "kernels": unable}) == "kernels"


def test_replays_count_what_the_captured_step_sends():
    meter = CommMeter()

    def step(inputs):
        meter.count(MOE_COMBINE, 100 * inputs.num_rows, rounds=2)
        return torch.zeros(inputs.num_rows, 5), torch.zeros(inputs.num_rows)

    runner = GraphRunner(RerunRecorder(), step, lambda *_: None, 0, meter)
    runner.capture_all([SimpleNamespace(num_rows=3)])
    assert (meter.rounds[MOE_COMBINE], meter.bytes[MOE_COMBINE]) == (4, 600), "two warm-ups, and no capture"
    sends = runner.choose(2).sends
    assert (sends.rounds[MOE_COMBINE], sends.bytes[MOE_COMBINE]) == (2, 300) and sum(sends.rounds.values()) == 2


def test_a_replayed_step_counts_as_an_eager_one(checkpoint):
    core = build(checkpoint)
    runner, meter = core.replica.runner, core.replica.runner.parallel.meter

    def rounds_of_a_run() -> dict[str, int]:
        before = dict(meter.rounds)
        ask(core, ([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6)))
        return {kind: count - before[kind] for kind, count in meter.rounds.items()}

    eager = rounds_of_a_run()
    recorder = record(runner)
    for graph in recorder.graphs:  # a graph runs no Python
        graph.replay = lambda: None
    assert rounds_of_a_run() == eager and sum(eager.values()) > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("graph"), SMALL)


def build(checkpoint, **settings) -> EngineCore:
    config = EngineConfig(str(checkpoint), device="cpu", dtype="float32", num_threads=1, max_num_seqs=6, **settings)
    return start_engine(config)[0]


def test_rows_whose_logits_alone_pass_the_budget_are_not_tried(checkpoint):
    runner = build(checkpoint, graph_memory_gb=3.5 * 4 * SMALL.vocab_size / 2**30).replica.runner
    record(runner)
    assert runner.graphs.choose(2) is not None and runner.graphs.choose(3) is None


@pytest.fixture(scope="module")
def plain(checkpoint) -> EngineCore:
    return build(checkpoint)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def replayed(request, checkpoint) -> EngineCore:
    core = build(checkpoint)
    core.recorder = record(core.replica.runner)
    core.replica.overlap = request.param
    return core


def mixed(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Ragged lengths over block borders; greedy, drawn, filtered and shaped rows side by side; ends at any time."""
    rng = random.Random(seed)
    kinds = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"logit_bias": {3: 2.0}}, {"min_tokens": 3}]
    found = []
    for i in range(count):
        temperature, length = rng.choice([0.0, 0.0, 0.8, 1.2]), rng.randint(3, 14)
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=length, **rng.choice(kinds))
        found.append(([rng.randrange(300) for _ in range(rng.choice([1, 2, 30, 60, 63, 64, 65, 127]))], params))
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 11])
def test_replayed_steps_give_the_same_tokens(plain, replayed, count):
    before = sum(g.num_replays for g in replayed.recorder.graphs)
    requests = mixed(count, count)
    for one, other in zip(ask(plain, *requests), ask(replayed, *requests), strict=True):
        assert (one.token_ids, one.text, one.end) == (other.token_ids, other.text, other.end)
    assert sum(g.num_replays for g in replayed.recorder.graphs) > before
    assert replayed.stats().kv_cache_usage == 0.0


def test_penalties_and_logprobs_use_the_replayed_logits(plain, replayed):
    params = SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.4, logprobs=2, prompt_logprobs=1)
    requests = [([5, 6, 7], params), ([9], SamplingParams(temperature=0.0, max_tokens=5))]
    for one, other in zip(ask(plain, *requests), ask(replayed, *requests), strict=True):
        assert one.token_ids == other.token_ids and len(one.logprobs) == len(other.logprobs)
        assert [list(row) for row in one.logprobs] == [list(row) for row in other.logprobs]


def test_a_dry_run_of_all_steps_leaves_no_trace(plain):
    """Here with kernels that do run: what it computes is of no request."""
    requests = mixed(3, 3)
    before = [answer.token_ids for answer in ask(plain, *requests)]
    runner = plain.replica.runner
    caches = runner.caches
    runner._dry_run()
    assert not hasattr(runner, "caches"), "a dry run has a cache of its own"
    runner.caches = caches
    assert [answer.token_ids for answer in ask(plain, *requests)] == before
