"""The ruler is straight: both transformers classes agree on our random checkpoints, the checkpoints have no near-ties
that rounding could flip, and each well-known mistake would show far above the tolerance of the comparison."""

from __future__ import annotations

import pytest
import torch

from tests import oracle
from tests.checkpoints import SHAPES, TRUE_HEADS, build_checkpoint, pack_int4, quantize_int4
from tests.deviations import FAULTS, plain_router

by_name = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)


@pytest.fixture(scope="module")
def true_heads(tmp_path_factory):
    directory = build_checkpoint(tmp_path_factory.mktemp("ruler"), TRUE_HEADS)
    return directory, oracle.logprobs(oracle.deepseek_v3(directory), oracle.prompts()[-1])


@pytest.mark.parametrize("quant", ["int4", "bf16"])
@by_name
def test_both_transformers_classes_agree(tmp_path, shape, quant):
    directory = build_checkpoint(tmp_path, shape, quant=quant, vision=True, shards=3)
    text, multimodal = oracle.deepseek_v3(directory), oracle.kimi_k25(directory)
    for ids in oracle.prompts():
        assert torch.allclose(oracle.logprobs(text, ids), oracle.logprobs(multimodal, ids), atol=1e-5, rtol=0)
    for model in (text, multimodal):
        assert {norm.variance_epsilon for norm in oracle.low_rank_norms(model)} == {1e-6}


@pytest.mark.parametrize("quant", ["int4", "bf16"])
@by_name
def test_checkpoints_leave_no_choice_to_rounding(tmp_path, shape, quant):
    """Float32 errors are near 1e-5 in logits and 1e-6 in router scores; every decision must be further apart."""
    model = oracle.deepseek_v3(build_checkpoint(tmp_path, shape, quant=quant))
    prompts = oracle.prompts()
    for prompt, tokens in zip(prompts, oracle.greedy(model, prompts, oracle.NUM_GREEDY), strict=True):
        assert len(set(tokens)) > oracle.NUM_GREEDY // 2, "the answer runs in a circle"
        ids = prompt + tokens
        best = oracle.logprobs(model, ids)[len(prompt) - 1 : -1].topk(2)
        assert best.indices[:, 0].tolist() == tokens
        assert (best.values[:, 0] - best.values[:, 1]).min() > 2e-4
        for router, scores in zip(oracle.routers(model), oracle.router_scores(model, ids), strict=True):
            k = shape.num_experts_per_tok
            keys = (scores + router.e_score_correction_bias).topk(k + 1)
            assert (keys.values[:, -2] - keys.values[:, -1]).min() > 1e-5
            chosen, unbiased = keys.indices[:, :k].sort().values, scores.topk(k).indices.sort().values
            assert (chosen != unbiased).any(-1).float().mean() > 0.1, "the correction bias changes nothing"
    assert len(chosen.unique()) > shape.n_routed_experts // 2, "a long prompt uses too few experts"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_known_mistake_would_be_seen(true_heads, fault):
    directory, expected = true_heads
    wrong = oracle.logprobs(FAULTS[fault](directory), oracle.prompts()[-1])
    assert (wrong - expected).abs().max() > 0.01


def test_router_equals_the_plain_formula(true_heads):
    directory, expected = true_heads
    plain = oracle.logprobs(plain_router(directory), oracle.prompts()[-1])
    assert (plain - expected).abs().max() < 1e-4


def test_softmax_scale_and_frequencies_of_the_true_head_sizes(true_heads):
    model = oracle.deepseek_v3(true_heads[0])
    assert model.model.layers[0].self_attn.scaling == pytest.approx(0.14467962580268923, rel=1e-12)
    known = {0: 1.0, 1: 7.131111e-1, 8: 6.687403e-2, 12: 1.161916e-2, 19: 1.583750e-4, 20: 1.807023e-5, 31: 4.382206e-7}
    for i, value in known.items():
        assert float(model.model.rotary_emb.inv_freq[i]) == pytest.approx(value, rel=1e-5)


def test_packing_against_a_known_word_and_the_compressed_tensors_package():
    row = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]], dtype=torch.int8)
    assert int(pack_int4(row)[0, 0]) & 0xFFFFFFFF == 0xFEA98710
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    q, scale = quantize_int4(weight)
    assert torch.equal(oracle.unpack_int4(pack_int4(q), scale), q.float() * scale.float().repeat_interleave(32, 1))

    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    assert torch.equal(pack_int4(q), helpers.pack_to_int32(q, 4))
    assert torch.equal(helpers.unpack_from_int32(pack_int4(q), 4, q.shape), q)
