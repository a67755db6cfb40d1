"""Random packed experts and routing for the tests of the INT4 kernels."""

from __future__ import annotations

import torch

from engine.kernels.gpu.experts import PackedExperts, empty_experts, put_down, put_gate_or_up


def random_matrix(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(packed int32 [rows, columns/8], scale bfloat16 [rows, columns/32]) in the checkpoint's layout."""
    device = generator.device
    packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=generator, device=device)
    scale = torch.rand(rows, columns // 32, generator=generator, device=device) * 0.02 + 0.002
    return packed.int(), scale.bfloat16()


def random_experts(experts: int, width: int, expert_width: int, generator: torch.Generator) -> PackedExperts:
    """`experts` experts packed from random matrices."""
    packed = empty_experts(experts, width, expert_width, generator.device)
    for index in range(experts):
        for is_up in (False, True):
            put_gate_or_up(packed, index, is_up, *random_matrix(expert_width, width, generator))
        put_down(packed, index, *random_matrix(width, expert_width, generator))
    return packed


def random_routing(
    rows: int, top_k: int, experts: int, here: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids int32 of `experts`, those from `here` on replaced by -1, and weights float32."""
    scores = torch.rand(rows, experts, generator=generator, device=generator.device)
    ids = scores.topk(top_k, dim=-1).indices.int()
    weights = torch.rand(rows, top_k, generator=generator, device=generator.device) + 0.1
    return torch.where(ids < here, ids, -1), weights
