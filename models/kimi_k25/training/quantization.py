"""Symmetric INT4 in groups of 32 inputs: what training simulates and what the checkpoint stores is the same number."""

from __future__ import annotations

import torch
from torch import Tensor

from models.kimi_k25.training.architecture import GROUP_SIZE


def group_scales(weight: Tensor) -> Tensor:
    """[..., in] float -> [..., in / 32] bfloat16: absmax / 7.5 of each group."""
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    return (groups.abs().amax(-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)


def quantize(weight: Tensor, scale: Tensor) -> Tensor:
    """[..., in] -> integers from -8 to 7 in the dtype float32."""
    groups = weight.float().unflatten(-1, (-1, GROUP_SIZE))
    return (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(-2)


def dequantize(integers: Tensor, scale: Tensor) -> Tensor:
    """Product in float32, rounded once to bfloat16."""
    groups = integers.float().unflatten(-1, (-1, GROUP_SIZE))
    return (groups * scale.float().unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def fake_quantize(weight: Tensor, strength: Tensor) -> Tensor:
    """`weight` moved to its INT4 value where `strength` is 1 and left alone where it is 0; the gradient goes straight
    through. `strength` is a tensor so that switching it on does not compile the model anew."""
    with torch.no_grad():
        scale = group_scales(weight)
        target = dequantize(quantize(weight, scale), scale).float()
        shift = (target - weight) * strength
    return weight + shift


def pack_int4(integers: Tensor) -> Tensor:
    """[out, in] integers from -8 to 7 -> [out, in / 8] int32, eight nibbles of value + 8, the lowest column lowest."""
    nibbles = (integers.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    shifts = torch.arange(8, device=integers.device) * 4
    words = (nibbles << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """[out, in / 8] int32 -> [out, in] integers from -8 to 7 (int64)."""
    shifts = torch.arange(8, device=words.device) * 4
    return (((words.to(torch.int64).unsqueeze(-1) >> shifts) & 15) - 8).flatten(-2)
