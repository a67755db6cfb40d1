"""Random packed experts and routing for the tests of the INT4 kernels."""

from __future__ import annotations

import torch

from engine.kernels.gpu.experts import PackedExperts, pack_gate_up
from engine.kernels.gpu.int4 import pack_int4


def random_matrix(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed int32 [rows, columns/8], scale bfloat16 [rows, columns/32]) in the checkpoint's layout."""
    device = generator.device
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator, device=device)
    scale = torch.rand(rows, columns // 32, generator=generator, device=device) * 0.02 + 0.002
    return packed.int(), scale.bfloat16()


def random_experts(experts: int, width: int, expert_width: int, generator: torch.Generator) -> PackedExperts:
    """`experts` experts whose outputs have about the size of their inputs."""
    gate_up, down = [], []
    for _ in range(experts):
        gate, up = (random_matrix(expert_width, width, generator) for _ in range(2))
        gate_up.append(pack_gate_up(gate, up))
        down.append(pack_int4(*random_matrix(width, expert_width, generator)))
    stacked = [torch.stack(tensors) for pair in (gate_up, down) for tensors in zip(*pair, strict=True)]
    return PackedExperts(*stacked)


def random_routing(
    rows: int, top_k: int, experts: int, here: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids int32 of `experts`, those from `here` on replaced by -1, and weights float32."""
    scores = torch.rand(rows, experts, generator=generator, device=generator.device)
    ids = scores.topk(top_k, dim=-1).indices.int()
    weights = torch.rand(rows, top_k, generator=generator, device=generator.device) + 0.1
    return torch.where(ids < here, ids, -1), weights
