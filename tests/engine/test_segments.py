"""Steps whose pieces between attentions are replayed: the same as at once, whatever their rows, company and padding."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch

from engine import chunk_step
from engine.attention.reference import ReferenceAttention
from engine.comm.meter import MOE_COMBINE, CommMeter
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledRequest, SchedulerOutput
from engine.segments import SegmentRunner
from tests import scripted_drafts
from tests.answers import ask
from tests.checkpoints import SMALL, WIDE, build_checkpoint
from tests.gloo_ranks import on_ranks
from tests.rerun import RerunRecorder, record, record_segments

SIZES = [4, 16, 64, 96]
BUDGET = 100  # tokens of a step: beyond the largest size too


class Step:
    """Of three layers, the second a feature layer; its residuals tell where they come from."""

    num_layers = 3

    def __init__(self, meter: CommMeter):
        self.meter, self.seen = meter, []

    def batch(self, num_rows: int) -> int:
        return num_rows

    def first(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), num_rows), torch.zeros(1)

    def after(self, index: int, cis, residual, entering: dict, num_rows: int) -> torch.Tensor:
        self.meter.count(MOE_COMBINE, 10 * num_rows)
        self.seen.append((num_rows, index, residual.item(), {layer: one.item() for layer, one in entering.items()}))
        return residual + 1

    def enters_feature_layer(self, index: int) -> bool:
        return index == 1


def runner_of(taken: list[int], max_bytes: int = 0, sizes=(4, 64, 128)) -> tuple[SegmentRunner, Step, RerunRecorder]:
    meter, recorder = CommMeter(), RerunRecorder(taken)
    step = Step(meter)
    runner = SegmentRunner(recorder, step, max_bytes, meter)
    runner.capture_all(sizes)
    return runner, step, recorder


def test_each_piece_gets_what_the_one_before_left_and_the_last_all_features():
    _, step, recorder = runner_of([], sizes=[4])
    once = [(4, 0, 0.0, {}), (4, 1, 1.0, {1: 1.0}), (4, 2, 2.0, {1: 1.0})]
    assert step.seen == 3 * once, "two warm-ups and the capture"
    assert len(recorder.graphs) == 4


def test_a_step_takes_the_smallest_size_that_fits_and_stays_within_the_invariant_range():
    runner, _, _ = runner_of([])
    chosen = [runner.choose(n) and runner.choose(n).num_rows for n in (1, 4, 5, 64, 65, 128, 129)]
    assert chosen == [4, 4, 64, 64, 128, 128, None]
    runner, _, _ = runner_of([], sizes=[128])
    assert runner.choose(64) is None and runner.choose(65).num_rows == 128


def test_sizes_over_the_budget_are_given_up_and_said(caplog):
    with caplog.at_level(logging.INFO):
        runner, _, recorder = runner_of([50, 0, 0, 1, 20, 9, 0, 0, 3, 3, 3, 3], max_bytes=45)
    assert sorted(runner.captured) == [4, 64] and runner.num_bytes == 41 and runner.choose(65) is None
    assert "128 rows" in caplog.text and "graph_memory_gb" in caplog.text
    assert recorder.graphs[0]._function is None, "its graphs are gone"


def test_what_a_replay_sends_is_known_and_captures_send_nothing():
    runner, step, _ = runner_of([], sizes=[4])
    assert step.meter.bytes[MOE_COMBINE] == 2 * 3 * 40, "of two warm-ups"
    assert runner.choose(1).sends.bytes[MOE_COMBINE] == 3 * 40


def test_a_capture_that_fails_leaves_no_graph():
    class OutOfMemory(RerunRecorder):
        def capture(self, function):
            if len(self.graphs) == 6:
                raise MemoryError("no room")
            return super().capture(function)

    recorder = OutOfMemory()
    runner = SegmentRunner(recorder, Step(CommMeter()), 0)
    with pytest.raises(MemoryError):
        runner.capture_all([4, 8])
    assert runner.captured == {} and recorder.graphs[0]._function is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("segments"), SMALL)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Of five layers."""
    return build_checkpoint(tmp_path_factory.mktemp("wide"), WIDE)


SETTINGS = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 5}


def build(checkpoint, **settings) -> EngineCore:
    return scripted_drafts.build(checkpoint, None, **(SETTINGS | settings))


@pytest.fixture(scope="module")
def plain(checkpoint) -> EngineCore:
    return build(checkpoint)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def replayed(request, checkpoint) -> EngineCore:
    core = build(checkpoint)
    if request.param:
        record(core.replica.runner)
    core.recorder = record_segments(core.replica.runner, SIZES)
    core.replica.overlap = request.param
    return core


def same(plain: EngineCore, replayed: EngineCore, requests: list) -> bool:
    """Tokens, ends and logprobs; returns whether some step was replayed."""
    before = sum(graph.num_replays for graph in replayed.recorder.graphs)
    for one, other in zip(ask(plain, *requests), ask(replayed, *requests), strict=True):
        assert (one.token_ids, one.end) == (other.token_ids, other.end)
        assert [list(row or ()) for row in one.logprobs] == [list(row or ()) for row in other.logprobs]
        scored = [[list(row or ()) for row in answer.prompt_logprobs or ()] for answer in (one, other)]
        assert scored[0] == scored[1]
    return sum(graph.num_replays for graph in replayed.recorder.graphs) > before


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{length} {seed}").randrange(300) for _ in range(length)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 95, 96, 190])
def test_a_prompt_of_any_length_gives_the_same_tokens(plain, replayed, length):
    company = [(prompt_of(3), GREEDY)] if length < 64 else []
    assert same(plain, replayed, [(prompt_of(length), GREEDY), *company])


def test_a_step_beyond_every_size_runs_at_once(plain, replayed):
    assert replayed.replica.runner.segments.choose(97) is None
    answers = [ask(core, (prompt_of(97), GREEDY))[0].token_ids for core in (plain, replayed)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [2, 5, 9])
def test_mixed_steps_give_the_same_tokens(plain, replayed, count):
    """Chunks beside decodes, requests that come and go, all kinds of sampling, logprobs of prompts and answers."""
    rng = random.Random(count)
    kinds = [{}, {"top_k": 5}, {"repetition_penalty": 1.3}, {"logprobs": 2}, {"prompt_logprobs": 1}, {"min_tokens": 3}]
    requests = []
    for i in range(count):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.randint(2, 8), **kinds[i % len(kinds)]
        )
        requests.append((prompt_of(rng.choice([1, 2, 20, 63, 65, 130]), i), params))
    assert same(plain, replayed, requests)


def test_a_cached_prefix_gives_the_same_tokens(plain, replayed):
    for tail in (1, 7, 40):
        assert same(plain, replayed, [(prompt_of(192) + prompt_of(tail, 1), GREEDY)])
    assert replayed.stats().kv_cache_usage == 0.0


def test_experts_are_counted_without_padding(plain, replayed):
    before = [core.replica.runner.expert_counts().sum().item() for core in (plain, replayed)]
    assert same(plain, replayed, [(prompt_of(21), SamplingParams(temperature=0.0, max_tokens=1))])
    after = [core.replica.runner.expert_counts().sum().item() for core in (plain, replayed)]
    assert after[0] - before[0] == after[1] - before[1] > 0


def test_rounds_are_counted_as_those_of_a_step_at_once(plain, replayed):
    def rounds(core: EngineCore) -> dict[str, int]:
        meter = core.replica.runner.parallel.meter
        before = dict(meter.rounds)
        for graph in getattr(core, "recorder", RerunRecorder()).graphs:  # a graph runs no Python
            graph.replay, graph.kept = (lambda: None), graph.replay
        ask(core, (prompt_of(30), SamplingParams(temperature=0.0, max_tokens=1)))
        for graph in getattr(core, "recorder", RerunRecorder()).graphs:
            graph.replay = graph.kept
        return {kind: count - before[kind] for kind, count in meter.rounds.items()}

    assert rounds(plain) == rounds(replayed) and sum(rounds(plain).values()) > 0


class ExpandedToo(ReferenceAttention):
    """Takes chunks of more than three tokens in the expanded form, as kernels do."""

    max_absorbed_query_len = 3
    most_cut_queries, least_cut_context = 20, 30


@pytest.mark.parametrize("most_query_rows", [0, 64])
def test_both_forms_of_queries_give_the_same_tokens(checkpoint, monkeypatch, most_query_rows):
    """Chunks, and decodes beside them, whether pieces make the queries or attention does."""
    monkeypatch.setattr(chunk_step, "MOST_QUERY_ROWS", most_query_rows)
    cores = build(checkpoint), build(checkpoint)
    for core in cores:
        core.replica.runner.model.backend = ExpandedToo()
    cores[1].recorder = record_segments(cores[1].replica.runner, SIZES)
    assert same(
        *cores, [(prompt_of(n), SamplingParams(temperature=0.0, max_tokens=n % 7 + 2)) for n in (2, 30, 70, 150)]
    )


def one_step(runner: ModelRunner, num_tokens: int) -> SchedulerOutput:
    request = Request("r", prompt_of(num_tokens + 1), GREEDY, 0, 1, block_ids=[1, 2])
    return SchedulerOutput([ScheduledRequest.next_of(request, num_tokens)])


def test_all_rows_and_cache_entries_are_those_of_a_step_at_once(checkpoint):
    """Also where another step has left its rows behind them."""
    core = build(checkpoint)
    runner = core.replica.runner
    record_segments(runner, [16])
    found = []
    for segments in (runner.segments, None):
        runner.segments = segments
        runner.caches.zero_()
        for count in (16, 9):
            batch = runner.input_batch.build(one_step(runner, count), runner.dispatchers.for_rows(count))
            with torch.inference_mode():
                hidden_TD, features_TF = runner._forward(batch)
        found.append((hidden_TD.clone(), runner.caches[:, 1:].clone()))
        assert hidden_TD.shape == (9, SMALL.hidden_size) and features_TF is None
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5) and torch.allclose(found[0][1], found[1][1], atol=1e-5)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_gets_its_features_and_its_guesses_are_verified(wide, ahead):
    requests = [(prompt_of(n, n), SamplingParams(temperature=0.0, max_tokens=9)) for n in (3, 70, 130)]
    answers = ask(build(wide), *requests)
    script = scripted_drafts.sometimes if ahead else scripted_drafts.right
    core = scripted_drafts.build(wide, 2, replays=ahead, **SETTINGS)
    recorder = record_segments(core.replica.runner, SIZES)
    scripted_drafts.teach(core, requests, answers, script)
    assert [a.token_ids for a in ask(core, *requests)] == [a.token_ids for a in answers]
    beyond_the_ends = len(requests) * (2 + 4 * ahead)
    assert core.drafter.num_lost <= beyond_the_ends < core.drafter.num_known
    assert sum(graph.num_replays for graph in recorder.graphs) > 0


@pytest.mark.parametrize("layers", [(1, 2), (5, 0, 3)])
def test_features_are_those_of_a_step_at_once(wide, layers):
    runner = build(wide).replica.runner
    runner.drafter = SimpleNamespace(feature_layers=layers)
    record_segments(runner, [16])
    batch = runner.input_batch.build(one_step(runner, 9), runner.dispatchers.for_rows(9))
    with torch.inference_mode():
        replayed = runner._forward(batch)[1]
        at_once = runner.model.forward_with_features(batch, runner.caches, layers)[1]
    assert replayed.shape == (9, len(layers) * WIDE.hidden_size) and torch.allclose(replayed, at_once, atol=1e-5)


def test_what_decodes_take_of_the_budget_is_not_for_chunks(checkpoint):
    runner = build(checkpoint, graph_memory_gb=1.0).replica.runner
    record(runner)
    next(iter(runner.graphs.captured.values())).num_bytes = 2**30
    record_segments(runner, [16])
    assert runner.segments.captured == {} and runner.segments.choose(3) is None
    hidden_TD, _ = runner._forward(runner.input_batch.build(one_step(runner, 9), runner.dispatchers.for_rows(9)))
    assert hidden_TD.shape[0] == 9, "such steps run at once"


def test_sizes_beyond_the_largest_step_are_not_captured(checkpoint):
    runner = build(checkpoint).replica.runner
    record_segments(runner, [16, BUDGET, BUDGET + 1])
    assert sorted(runner.segments.captured) == [16, BUDGET]
    runner.drop_graphs()
    assert runner.segments is None


COMMS = ("allreduce", "symm_scatter", "nccl_a2a")


def steps_on_ranks(parallel: ParallelState, checkpoint: str) -> list[dict]:
    return [step_on_ranks(parallel, checkpoint, moe_comm) for moe_comm in COMMS]


def step_on_ranks(parallel: ParallelState, checkpoint: str, moe_comm: str) -> dict:
    config = EngineConfig(
        checkpoint, tp=2, ep=2, device="cpu", dtype="float32", num_threads=1, moe_comm=moe_comm,
        kv_cache_memory_gb=0.01, **SETTINGS,
    )  # fmt: skip
    files = ModelFiles.read(config)
    runner = ModelRunner(config, files, parallel)
    core = EngineCore(config, files, runner)
    request = (prompt_of(13), SamplingParams(temperature=0.0, max_tokens=2))
    at_once = ask(core, request)[0].token_ids
    recorder = record_segments(runner, [16, 64], [2**40] if parallel.rank else [])
    tokens = ask(core, request)[0].token_ids
    captured = sorted(runner.segments.captured)
    runner.close()
    return {"tokens": [at_once, tokens], "captured": captured, "replays": sum(g.num_replays for g in recorder.graphs)}


def test_ranks_keep_the_same_sizes_and_give_the_same_tokens(tmp_path, checkpoint):
    """One of them has no room for the larger one. Tokens are replicated, or each rank has its rows' residuals alone."""
    first, second = on_ranks(2, tmp_path, steps_on_ranks, str(checkpoint))
    assert first == second and len(first) == len(COMMS)
    for outcome in first:
        assert outcome["captured"] == [16] and outcome["replays"] > 0
        assert outcome["tokens"][0] == outcome["tokens"][1]
