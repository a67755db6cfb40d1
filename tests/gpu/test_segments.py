"""Steps whose pieces between attentions are CUDA graphs: the bits of a step at once up to 64 rows, close beyond."""

from __future__ import annotations

import random

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import FULL_CONFIG
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.scheduler import ScheduledRequest, SchedulerOutput

pytestmark = pytest.mark.gpu

SETTINGS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 600,
    "kv_cache_memory_gb": 1.0,
}


@pytest.fixture(scope="module")
def replayed():
    with LLM(**SETTINGS, enable_prefix_caching=False) as llm:
        captured = llm._engine.replica.runner.segments.captured
        assert sorted(captured) == [64, 128, 192, 256, 384, 512], "those that the largest step can fill"
        yield llm


@pytest.fixture(scope="module")
def eager():
    with LLM(**SETTINGS, enable_prefix_caching=False, enforce_eager=True) as llm:
        assert llm._engine.replica.runner.segments is None
        yield llm


def runner_of(llm: LLM) -> ModelRunner:
    return llm._engine.replica.runner


def step_of(parts: list[tuple[int, int]], seed: int = 0) -> SchedulerOutput:
    """parts: (tokens, context) of each request; their blocks are their own."""
    rng, items, block = random.Random(seed), [], 1
    for index, (num_tokens, context) in enumerate(parts):
        length = context + num_tokens
        blocks = list(range(block, block + length // 64 + 1))
        block = blocks[-1] + 1
        prompt = [rng.randrange(300) for _ in range(length + 1)]
        request = Request(f"r{index}", prompt, SamplingParams(), 0, 1, num_computed_tokens=context, block_ids=blocks)
        items.append(ScheduledRequest.next_of(request, num_tokens))
    return SchedulerOutput(items)


@torch.inference_mode()
def rows_of(runner: ModelRunner, output: SchedulerOutput, at_once: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The final norm's output, and what the step wrote to the cache, over a context that is the same every time."""
    generator = torch.Generator("cuda").manual_seed(1)
    runner.caches[:, 1:60].normal_(generator=generator)
    batch = runner.input_batch.build(output, runner.dispatchers.for_rows(output.num_tokens))
    segments = runner.segments
    runner.segments = None if at_once else segments
    try:
        assert at_once or segments.choose(output.num_tokens) is not None
        hidden_TD, _ = runner._forward(batch)
    finally:
        runner.segments = segments
    return hidden_TD.clone(), runner.caches.flatten(1, 2)[:, batch.slots_T].clone()


SMALL_STEPS = [
    [(1, 0)],
    [(5, 0)],
    [(17, 0)],
    [(63, 0)],
    [(64, 0)],
    [(40, 100)],
    [(1, 50), (1, 130), (30, 0)],
    [(1, 50), (20, 64), (3, 70), (25, 128)],
    [(1, 1), (16, 0), (17, 0), (30, 200)],
]


@pytest.mark.parametrize("parts", SMALL_STEPS, ids=str)
def test_steps_of_up_to_64_rows_have_the_bits_of_a_step_at_once(replayed, parts):
    runner = runner_of(replayed)
    expected = rows_of(runner, step_of(parts), at_once=True)
    for _ in range(3):
        found = rows_of(runner, step_of(parts), at_once=False)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_so_do_two_layers_of_the_full_share():
    settings = SETTINGS | {"hf_overrides": {"num_hidden_layers": 2}, "max_model_len": 512}
    with LLM(str(FULL_CONFIG), load_format="dummy", tp_share=8, **settings) as llm:
        runner = runner_of(llm)
        for parts in SMALL_STEPS:
            expected, found = (rows_of(runner, step_of(parts), at_once) for at_once in (True, False))
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]), parts


@pytest.mark.parametrize("num_rows", [65, 127, 128, 129, 250, 300, 385, 512])
@pytest.mark.parametrize("context", [0, 200])
def test_larger_steps_are_close_to_those_at_once(replayed, num_rows, context):
    """Of made-up tokens; a router's near-tie may send a row elsewhere, so a few rows may differ by more."""
    runner = runner_of(replayed)
    output = step_of([(1, 30), (2, 90), (num_rows - 3, context)])
    expected, found = (rows_of(runner, output, at_once)[0].float() for at_once in (True, False))
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.05 and (errors > 0.3).float().mean() < 0.1
    assert found.isfinite().all()


def test_rows_that_another_step_has_left_are_never_seen(replayed):
    runner = runner_of(replayed)
    small = step_of([(9, 0), (1, 70)], seed=1)
    expected = rows_of(runner, small, at_once=False)
    rows_of(runner, step_of([(64, 0)], seed=2), at_once=False)
    rows_of(runner, step_of([(500, 0)], seed=3), at_once=False)
    found = rows_of(runner, small, at_once=False)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("num_tokens", [3, 40, 100, 500])
def test_experts_are_counted_without_padding(replayed, num_tokens):
    before = replayed.expert_load().num_tokens
    prompt = [random.Random(num_tokens).randrange(300) for _ in range(num_tokens)]
    replayed.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    grown = replayed.expert_load().num_tokens - before
    assert num_tokens <= grown <= num_tokens + 1, "a step in flight when the request ends computes one token too many"


def test_no_token_depends_on_replays_where_steps_are_small(replayed, eager):
    """Prompts one by one, so that no step passes 64 rows."""
    for length in (1, 2, 15, 16, 17, 33, 63, 64):
        prompt = [random.Random(length).randrange(300) for _ in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
        answers = [llm.generate([prompt], params)[0].outputs[0].token_ids for llm in (replayed, eager)]
        assert answers[0] == answers[1]


def test_mixed_traffic_runs_with_replays_and_a_prefix_cache():
    """Chunks beside decodes, prompts that share a prefix, a draft: every answer ends, and the cache is empty again."""
    rng = random.Random(5)
    shared = [rng.randrange(300) for _ in range(400)]
    prompts = [shared + [rng.randrange(300) for _ in range(rng.choice([1, 30, 90, 500]))] for _ in range(20)]
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(20)]
    with LLM(**SETTINGS, draft="auto") as llm:
        runner = runner_of(llm)
        assert runner.segments.captured and runner.drafter is not None
        outputs = llm.generate(prompts, params)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [5 + i for i in range(20)]
        assert llm._engine.stats().kv_cache_usage == 0.0


def test_a_budget_of_nothing_leaves_such_steps_at_once():
    with LLM(**SETTINGS, graph_memory_gb=0.0) as llm:
        assert runner_of(llm).segments.captured == {}
        assert (
            len(llm.generate([[1] * 100], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
        )
