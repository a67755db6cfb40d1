"""YaRN rotary embedding (Peng et al. 2023, section 3.4, with DeepSeek's mscale): frequencies, angles, softmax scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.kernels.table import Kernels


@dataclass(frozen=True)
class RopeParameters:
    """The checkpoint's rope keys. `factor` 1 means plain rope."""

    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(dim: int, rope: RopeParameters) -> torch.Tensor:
    """Float32 [dim / 2] radians a position; high frequencies kept, low ones divided by the factor, a ramp between."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.factor <= 1.0:
        return 1.0 / powers

    def correction(rotations: float) -> float:
        span = rope.original_max_position_embeddings / (2 * math.pi * rotations)
        return dim * math.log(span) / (2 * math.log(rope.theta))

    low = max(math.floor(correction(rope.beta_fast)), 0)
    high = min(math.ceil(correction(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (1 - ramp) / powers + ramp / (rope.factor * powers)


def softmax_scale(head_dim: int, rope: RopeParameters) -> float:
    """head_dim ** -0.5 times mscale squared: the YaRN temperature lives in the scores, not in cos and sin."""
    return head_dim**-0.5 * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2


class RotaryEmbedding:
    """Angles for the positions of a step; computed once and shared by all layers."""

    def __init__(self, dim: int, rope: RopeParameters, device: torch.device, kernels: Kernels):
        self.kernels = kernels
        self.inverse_frequencies = inverse_frequencies(dim, rope).to(device)
        self.magnitude = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)

    def __call__(self, positions_T: torch.Tensor) -> torch.Tensor:
        """complex64 [T, dim / 2]."""
        return self.kernels.rope_angles(positions_T, self.inverse_frequencies, self.magnitude)
