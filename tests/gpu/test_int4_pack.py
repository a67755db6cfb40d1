"""The packing kernel on a device: into tiles that begin far into a tensor, from matrices at odd places."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.gpu import int4_pack
from engine.kernels.gpu.experts import PackedExperts, empty_experts, expanded, put_down, put_gate_or_up
from tests.int4_experts import pack_cases, random_matrix

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def test_like_the_twin():
    for name, targets, expected, matrix, half in pack_cases(GPU):
        int4_pack._pack_on_host(*expected, *matrix, half)
        int4_pack.pack_into(*targets, *matrix, half)
        assert all(torch.equal(found, wanted) for found, wanted in zip(targets, expected, strict=True)), name


def test_matrices_of_k25_at_odd_places():
    """Into the last of many experts, from bytes that begin four behind a multiple of 16."""
    width, inner, count = 7168, 2048, 160
    experts = empty_experts(count, width, inner, GPU)
    generator = torch.Generator(GPU).manual_seed(3)
    for is_up in (False, True):
        put_gate_or_up(experts, count - 1, is_up, *map(moved, random_matrix(inner, width, generator)))
    put_down(experts, count - 1, *map(moved, random_matrix(width, inner, generator)))
    generator.manual_seed(3)
    twin = empty_experts(1, width, inner, GPU)
    for is_up in (False, True):
        tiles = twin.gate_up_words[0], twin.gate_up_scales[0]
        int4_pack._pack_on_host(*tiles, *random_matrix(inner, width, generator), int(is_up))
    int4_pack._pack_on_host(twin.down_words[0], twin.down_scales[0], *random_matrix(width, inner, generator), None)
    last = PackedExperts(*(tensor[-1:] for tensor in vars(experts).values()))
    assert all(torch.equal(found, wanted) for found, wanted in zip(expanded(last), expanded(twin), strict=True))


def moved(x: torch.Tensor) -> torch.Tensor:
    """The same at a place that is no multiple of 16 bytes."""
    room = torch.empty(x.nbytes + 4, dtype=torch.uint8, device=x.device)[4:].view(x.dtype).view(x.shape)
    return room.copy_(x)
