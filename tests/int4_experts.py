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


def pack_cases(device: torch.device) -> list[tuple]:
    """(name, tiles to fill, the same for the twin, (packed, scale), half) of one expert, for `int4_pack.pack_into`."""
    generator, cases = torch.Generator().manual_seed(11), []
    for name, rows, columns, half, dtype in (
        ("one column of tiles", 128, 128, None, torch.bfloat16),
        ("down", 256, 384, None, torch.float32),
        ("gate", 128, 256, 0, torch.bfloat16),
        ("up", 128, 384, 1, torch.float16),
    ):
        packed, scale = (half_.to(device) for half_ in random_matrix(rows, 2 * columns, generator))
        matrix = packed[:, columns // 8 :], scale.to(dtype)[:, columns // 32 :]  # a rank's columns of whole rows
        tiles = []
        for _ in range(2):
            width, expert_width = (rows, columns) if half is None else (columns, rows)
            experts = empty_experts(1, width, expert_width, device)
            which = (experts.down_words, experts.down_scales)
            which = which if half is None else (experts.gate_up_words, experts.gate_up_scales)
            tiles.append(tuple(tensor[0].zero_() for tensor in which))
        cases.append((name, *tiles, matrix, half))
    return cases
