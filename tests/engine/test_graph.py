"""Replayed decode steps: the same tokens as without, whatever the bucket, lengths, padding and sampling; a budget."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch

from engine import rehearsal
from engine.comm.collectives import agree_on_minimum
from engine.comm.meter import MOE_COMBINE, CommMeter
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.decode_step import Variant, variants
from engine.graph import GraphRunner, capture_obstacle
from engine.launch import start_engine
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler import GuessPlan
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.gloo_ranks import on_ranks
from tests.rerun import DeviceLengths, RerunRecorder, record


class Step:
    """One that computes nothing and sends what it is told to for each of its rows."""

    def __init__(self, meter: CommMeter | None = None):
        self.meter = meter or CommMeter()

    def whole(self, inputs, variant: Variant) -> None:
        self.finish(variant, self.forward(inputs, variant))

    def forward(self, inputs, variant: Variant) -> tuple:
        self.meter.count(MOE_COMBINE, 100 * variant.num_rows, rounds=2)
        return (SimpleNamespace(logits_MV=torch.zeros(variant.num_rows, 5)),)

    def finish(self, variant: Variant, forwarded: tuple) -> None:
        assert forwarded[0].logits_MV.shape == (variant.num_rows, 5)


def wanted(sizes: list[int], num_guesses: int = 0, max_rows: int = 99) -> list[tuple[Variant, None]]:
    return [(variant, None) for variant in variants(sizes, num_guesses, max_rows)]


def runner_of(sizes: list[int], taken: list[int], budget: int, **options) -> GraphRunner:
    runner = GraphRunner(RerunRecorder(taken), Step(), budget)
    runner.capture_all(wanted(sizes, **options))
    return runner


def chosen(runner: GraphRunner, num_requests: int, *plan: int) -> Variant | None:
    graph = runner.choose(num_requests, GuessPlan(*plan))
    return graph and graph.variant


def test_each_number_of_requests_gets_the_smallest_bucket():
    runner = runner_of([1, 2, 4, 6], [], 0)
    sizes = [chosen(runner, n).num_requests for n in range(1, 7)]
    assert sizes == [1, 2, 4, 4, 6, 6] and runner.choose(7) is None and runner.choose(0) is None


def test_buckets_over_the_budget_are_given_up_and_said(caplog):
    with caplog.at_level(logging.INFO):
        runner = runner_of([1, 2, 4], [90, 4, 6, 40, 1, 0, 30, 5, 4], 80)
    assert [chosen(runner, n) and chosen(runner, n).num_requests for n in (1, 2, 3, 4)] == [1, 2, None, None]
    assert runner.num_bytes == 80
    assert "4 rows" in caplog.text and "graph_memory_gb" in caplog.text and "2 decode graphs" in caplog.text


def test_no_budget_no_graph():
    assert runner_of([1, 2], [5] * 6, 0).choose(1) is None


def test_variants_are_plain_guessing_and_both_alike_up_to_the_most_rows():
    assert variants([1, 4], 0, 99) == [(1, 0, 0), (4, 0, 0)]
    assert set(variants([1, 4], 2, 8)) == {(1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 0, 2), (4, 0, 0), (4, 1, 1), (4, 0, 2)}
    assert set(variants([8], 3, 4)) == {(8, 0, 0)}, "plain steps are never left out"


def test_a_plan_gets_its_graph_or_the_next_smaller_one():
    runner = runner_of([1, 4], [], 0, num_guesses=3, max_rows=8)
    assert [chosen(runner, 1, k, k) for k in range(4)] == [(1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 3)]
    assert chosen(runner, 1, 0, 3) == (1, 0, 3) and chosen(runner, 3, 0, 3) == (4, 0, 3)
    assert [chosen(runner, 3, k, k) for k in range(4)] == [(4, 0, 0), (4, 1, 1), (4, 1, 1), (4, 1, 1)]
    assert chosen(runner, 2, 2, 0) == (4, 1, 1) and chosen(runner, 1, 0, 1) == (1, 0, 0)
    assert runner.num_verify(1) == [0, 1, 2, 3] and runner.num_verify(4) == [0, 1] and runner.num_verify(5) == []


def test_nothing_is_verified_where_no_step_can_make_the_first_guesses():
    runner = runner_of([1], [0] * 9 + [90, 0, 0], 80, num_guesses=2)
    assert sorted(runner.captured) == [(1, 0, 0), (1, 1, 1), (1, 2, 2)] and runner.num_verify(1) == [0]


def test_a_size_whose_plain_step_does_not_fit_is_not_used_at_all():
    """Steps of it would else depend on what is planned."""
    taken = [9, 0, 0] + [50, 0, 0] * 2 + [60, 0, 0] + [0] * 6  # 2 x 2 rows; 2 that guess or are plain; 1 x 2 rows; ...
    runner = runner_of([1, 2], taken, 55, num_guesses=1)
    assert (2, 1, 1) in runner.captured and (2, 0, 0) not in runner.captured
    assert runner.choose(2) is None and runner.num_verify(2) == [] and chosen(runner, 1) == (1, 0, 0)


def test_a_capture_that_fails_leaves_no_graph():
    """One that lived on would keep NCCL from ending, and so the engine from saying why it did not start."""

    class OutOfMemory(RerunRecorder):
        def memory(self) -> int:
            if len(self.graphs) == 6:
                raise MemoryError("no room")
            return super().memory()

    runner = GraphRunner(OutOfMemory(), Step(), 0)
    with pytest.raises(MemoryError):
        runner.capture_all(wanted([1, 2, 4]))
    assert runner.captured == {} and runner.choose(1) is None


ROOM = (
    ((100, 0, 0), (40, 1, 0), (30, 4, 5)),
    ((90, 0, 0), (50, 0, 2), (20, 8, 0)),
    ((20, 0, 0), (60, 7, 2), (4, 2, 2)),
)
"""For each of three ranks, what the captures of buckets 4, 2 and 1 take: none could keep more than some."""


def kept_on_ranks(parallel: ParallelState) -> tuple[list[tuple], int, list[int]]:
    """The buckets this rank keeps, what it believes they take, and when it entered captures."""
    recorder = RerunRecorder([size for bucket in ROOM[parallel.rank] for size in bucket])
    agreed: list[int] = []

    def agree(value: int) -> int:
        agreed.append(value)
        return agree_on_minimum(value, parallel)

    runner = GraphRunner(recorder, Step(), 92, agree=agree)
    runner.capture_all(wanted([1, 2, 4]))
    return sorted(map(tuple, runner.captured)), runner.num_bytes, agreed


def test_ranks_keep_the_same_buckets_though_one_has_less_memory(tmp_path):
    """Alone, rank 0 would keep 2 and 1, rank 1 would keep 4, rank 2 would keep 4 and 2."""
    outcomes = on_ranks(3, tmp_path, kept_on_ranks)
    assert [kept for kept, _, _ in outcomes] == [[(2, 0, 0)]] * 3
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
    recorder = RerunRecorder([2**30, 0, 0] if parallel.rank else [])
    runner.capture(recorder)
    tokens = ask(core, request)[0].token_ids
    before = dict(parallel.meter.rounds)
    for graph in recorder.graphs:  # a graph runs no Python
        graph.replay = lambda: None
    ask(core, request)
    replayed = {kind: count - before[kind] for kind, count in parallel.meter.rounds.items()}
    captured = sorted(map(tuple, runner.graphs.captured))
    runner.close()
    return {"tokens": [eager, tokens], "sent": [sent, replayed], "captured": captured, "open": runner.graphs}


def test_ranks_capture_replay_and_count_alike(tmp_path, checkpoint):
    first, second = on_ranks(2, tmp_path, capture_on_ranks, str(checkpoint))
    assert first == second
    assert first["captured"] == [(1, 0, 0), (2, 0, 0)] and first["open"] is None
    assert first["tokens"][0] == first["tokens"][1]
    assert first["sent"][0] == first["sent"][1] and first["sent"][0]["attention_reduce"] > 0


def test_what_cannot_be_captured_is_named():
    able, unable = SimpleNamespace(is_capturable=True), SimpleNamespace()
    assert capture_obstacle({"attention": able, "kernels": able}) is None
    assert capture_obstacle({"attention": able, "kernels": unable}) == "kernels"


def test_replays_count_what_the_captured_step_sends():
    meter = CommMeter()
    runner = GraphRunner(RerunRecorder(), Step(meter), 0, meter)
    runner.capture_all(wanted([3]))
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


def test_a_dry_run_of_all_steps_leaves_no_trace(checkpoint):
    """Here with kernels that do run: what it computes is of no request."""
    core = build(checkpoint, max_num_batched_tokens=64, max_model_len=256)
    requests = mixed(3, 3)
    before = [answer.token_ids for answer in ask(core, *requests)]
    runner = core.replica.runner
    caches = runner.caches
    rehearsal._dry_run(runner)
    assert runner.caches is None, "a dry run has a cache of its own"
    runner.caches = caches
    assert [answer.token_ids for answer in ask(core, *requests)] == before
