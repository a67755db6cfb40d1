"""CUDA graphs, sampling kernels and overlap on a GPU: nothing that a caller sees depends on them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams, sampling
from engine.kernels.gpu import sample
from engine.request import Request
from tests.rerun import RerunRecorder

pytestmark = pytest.mark.gpu

MOST = 8
SETTINGS = {"device": "cuda", "max_num_seqs": MOST, "enable_prefix_caching": False}
"""In bfloat16 the tail of a cached prompt is computed in other company, whose bits may differ."""


@pytest.fixture(scope="module")
def replayed():
    with LLM(**SETTINGS, dtype="bfloat16") as llm:
        assert llm._engine.replica.runner.graphs is not None, "the kernels of bfloat16 can be captured"
        yield llm


@pytest.fixture(scope="module")
def eager():
    with LLM(**SETTINGS, dtype="bfloat16", enforce_eager=True, kv_cache_memory_gb=2.0) as llm:
        assert llm._engine.replica.runner.graphs is None
        yield llm


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(300) for _ in range(rng.choice([1, 5, 63, 64, 65, 200]))] for _ in range(count)]


def params_of(count: int, **changes) -> list[SamplingParams]:
    """Answers of different lengths, so that steps go down through all buckets with padding."""
    return [SamplingParams(max_tokens=6 + 5 * i, seed=i, ignore_eos=True, **changes) for i in range(count)]


def tokens_of(llm: LLM, some: list, params: list) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(some, params)]


@pytest.mark.parametrize("count", range(1, MOST + 3))
def test_graphs_change_no_token(replayed, eager, count):
    some = prompts(count), params_of(count, temperature=0.0)
    assert tokens_of(replayed, *some) == tokens_of(eager, *some)


@pytest.mark.parametrize("count", [1, 3, MOST])
def test_replayed_steps_count_experts_without_their_padding(replayed, count):
    """Steps of a token a request, in buckets larger than the number of requests; the prompts count too."""
    before = replayed.expert_load()
    outputs = replayed.generate(*(prompts(count), params_of(count, temperature=0.0)))
    after = replayed.expert_load()
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    ahead = replayed._engine.replica.overlap * count  # a step in flight when a request ends computes one token too many
    assert tokens <= after.num_tokens - before.num_tokens <= tokens + ahead
    growth = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(after.layers, before.layers, strict=True)]
    top_k = replayed._engine.replica.runner.model_config.num_experts_per_tok
    assert {sum(row) for row in growth} == {(after.num_tokens - before.num_tokens) * top_k}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_replay_is_the_padded_step_itself(replayed, temperature):
    runner = replayed._engine.replica.runner
    some = prompts(11), params_of(11, temperature=temperature, top_p=0.9)
    expected, graphs = tokens_of(replayed, *some), runner.graphs
    try:
        runner.capture(RerunRecorder())
        assert tokens_of(replayed, *some) == expected
    finally:
        runner.graphs = graphs


@pytest.mark.parametrize("changes", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.2}])
def test_graphs_change_no_drawn_token(replayed, eager, changes):
    some = prompts(5), params_of(5, temperature=0.9, **changes)
    assert tokens_of(replayed, *some) == tokens_of(eager, *some)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_overlap_changes_no_token(dtype):
    with LLM(**SETTINGS, dtype=dtype, kv_cache_memory_gb=2.0) as llm:
        # In bfloat16 all prompts enter in the first step: in other company a long one's bits may differ.
        count = 11 if dtype == "float32" else MOST
        some = prompts(count), params_of(count, temperature=0.7, top_p=0.9)
        assert llm._engine.replica.overlap
        ahead = tokens_of(llm, *some)
        llm._engine.replica.overlap = False
        assert tokens_of(llm, *some) == ahead


def test_a_budget_of_nothing_leaves_all_steps_eager():
    with LLM(device="cuda", dtype="bfloat16", max_num_seqs=2, graph_memory_gb=0.0, kv_cache_memory_gb=1.0) as llm:
        expected = tokens_of(llm, prompts(2), params_of(2, temperature=0.0))
        assert all(len(tokens) == 6 + 5 * i for i, tokens in enumerate(expected))


@pytest.mark.parametrize("vocab", [1000, 20480, 163840])
@pytest.mark.parametrize("ties", [False, True])
def test_kernels_choose_as_their_twins_on_the_cpu(vocab, ties):
    """Up to sums and logarithms whose last bits differ, which may change a draw where two tokens almost tie."""
    rng = random.Random(vocab)
    kinds = [
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 9, "top_p": 0.5},
    ]
    params = [SamplingParams(temperature=rng.choice([0.0, 0.6, 1.0]), **kinds[i % len(kinds)]) for i in range(56)]
    requests = [Request("r", [1] * (1 + i), p, rng.getrandbits(64) - 2**63, 99) for i, p in enumerate(params)]
    logits_SV = torch.randn(56, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits_SV = logits_SV.round() if ties else logits_SV
    found = [_choose(sampling, logits_SV, requests), _choose(sample, logits_SV.cuda(), requests)]
    same = torch.tensor([a == b for a, b in zip(*found, strict=True)])
    greedy = torch.tensor([p.greedy or p.top_k == 1 or p.top_p == 1e-6 for p in params])
    assert same[greedy].all() and same.float().mean() > 0.96


def _choose(module, logits_SV: torch.Tensor, requests: list[Request]) -> list[int]:
    device = logits_SV.device
    tokens_S = torch.full((len(requests),), -1, dtype=torch.int64, device=device)
    rows = sampling.SamplingRows.of(requests, np.array([r.num_tokens for r in requests]), device)
    module.draw(logits_SV, module.greedy(logits_SV, tokens_S), rows, tokens_S)
    return tokens_S.tolist()


def test_a_row_is_drawn_alike_in_any_company():
    logits_SV = torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)).cuda()
    params = SamplingParams(top_p=0.9, top_k=300)
    requests = [Request("r", [1] * (1 + i), params, i, 99) for i in range(64)]
    together = _choose(sample, logits_SV, requests)
    assert [_choose(sample, logits_SV[i : i + 1], [requests[i]])[0] for i in range(64)] == together
