"""The packing kernel under Triton's interpreter, against the packing without a kernel."""

from __future__ import annotations

import pytest
import torch

from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
from engine.kernels.gpu import int4_pack
from engine.kernels.gpu.experts import empty_experts
from tests.int4_experts import pack_cases, random_matrix

CPU = torch.device("cpu")
if INTERPRETED:
    allow_scalar_arrays()


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


@interpreted
@pytest.mark.parametrize("case", pack_cases(CPU), ids=lambda case: case[0])
def test_like_the_twin(case, monkeypatch):
    _, targets, expected, matrix, half = case
    int4_pack.pack_into(*expected, *matrix, half)
    with monkeypatch.context() as patch:
        patch.setattr(int4_pack, "_pack_on_host", int4_pack.launch)
        int4_pack.pack_into(*targets, *matrix, half)
    assert all(torch.equal(found, wanted) for found, wanted in zip(targets, expected, strict=True))
    assert targets[0].count_nonzero() > 0.4 * targets[0].numel()


def test_another_matrix_than_the_tiles_are_for_is_refused():
    experts = empty_experts(1, 256, 128, CPU)
    tiles = experts.down_words[0], experts.down_scales[0]
    packed, scale = random_matrix(128, 256, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="tiles of 256 x 128 weights take no matrix of 128 x 256"):
        int4_pack.pack_into(*tiles, packed, scale)
    with pytest.raises(ValueError, match="columns must lie together"):
        int4_pack.pack_into(*tiles, packed.view(16, 256).t()[:, :16], scale.view(4, 256).t())
