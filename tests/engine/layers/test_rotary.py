"""YaRN against numbers worked out by hand, and against transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.rotary import RopeParameters, RotaryEmbedding, inverse_frequencies, softmax_scale, yarn_mscale

KIMI = RopeParameters(50000.0, 64.0, 4096, 32.0, 1.0, 1.0, 1.0)
CPU = torch.device("cpu")


def test_plain_rope():
    got = inverse_frequencies(8, RopeParameters(10000.0))
    assert got.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_fast_pairs_keep_their_frequency_and_slow_ones_are_stretched():
    got, plain = inverse_frequencies(64, KIMI), inverse_frequencies(64, RopeParameters(50000.0))
    assert torch.equal(got[:8], plain[:8])
    assert torch.allclose(got[20:], plain[20:] / 64)
    assert bool((got[8:20] <= plain[8:20]).all()) and bool((got[8:20] >= plain[8:20] / 64 * 0.999).all())


@pytest.mark.parametrize("rope", [KIMI, RopeParameters(10000.0, 40.0, 128, 32.0, 1.0, 1.0, 0.707)])
def test_angles_equal_transformers(rope):
    config = DeepseekV3Config(
        hidden_size=64,
        num_attention_heads=2,
        qk_rope_head_dim=16,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": rope.theta,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        },
    )
    positions = torch.tensor([0, 1, 2, 77, 4095, 4096, 8191])
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    cis = RotaryEmbedding(16, rope, CPU, ReferenceKernels())(positions)
    assert torch.allclose(cis.real, cos[0, :, :8], atol=2e-4)
    assert torch.allclose(cis.imag, sin[0, :, :8], atol=2e-4)


def test_the_softmax_scale_of_kimi():
    """192 ** -0.5 times (0.1 ln 64 + 1) squared."""
    assert softmax_scale(192, KIMI) == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)
    assert softmax_scale(192, RopeParameters(50000.0)) == 192**-0.5
    assert yarn_mscale(0.5, 1.0) == 1.0
