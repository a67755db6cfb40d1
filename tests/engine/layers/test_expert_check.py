"""The self-test of INT4 experts: silent where they are sound, and a refusal to start where they are not."""

from __future__ import annotations

import logging

import pytest
import torch

from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.kernels import reference
from engine.launch import start_engine
from engine.layers.expert_check import BOUNDS, largest_error
from engine.layers.quant import MATRICES, Int4Experts
from tests.checkpoints import SMALL, build_checkpoint, pack_int4, quantize_int4

EXPERTS, WIDTH, INNER = 4, 64, 128


def filled(parallel: ParallelState, dtype: torch.dtype) -> tuple[Int4Experts, dict]:
    """A rank's experts, and its part of the last one's matrices as the checkpoint stores them."""
    experts = Int4Experts(EXPERTS, WIDTH, INNER, parallel, dtype)
    generator, matrices, specs = torch.Generator().manual_seed(0), {}, experts.specs("")
    for expert in range(EXPERTS):
        for name in MATRICES:
            shape = (WIDTH, INNER) if name == "down_proj" else (INNER, WIDTH)
            q, scale = quantize_int4(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
            parts = []
            for ending, value in (("weight_packed", pack_int4(q)), ("weight_scale", scale)):
                spec = specs[f"{expert}.{name}.{ending}"]
                if spec.part is not None:
                    parts.append(value[spec.part])
                    spec.store(parts[-1])
            if expert == experts.local[-1]:
                matrices[name] = tuple(parts)
    return experts, matrices


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b145_sound_experts_pass_on_every_rank(tp, ep, dtype):
    for rank in range(tp):
        experts, matrices = filled(ParallelState(rank=rank, tp=tp, ep=ep), dtype)
        assert largest_error(experts, len(experts.local) - 1, matrices, dtype, top_k=2) < BOUNDS[dtype] / 2


def damaged(kind: str, words: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What kernels and repackers have got wrong."""
    if kind == "no offset":
        return words ^ (0x88888888 - 2**32), scales
    if kind == "nibbles swapped":
        return ((words >> 4) & 0x0F0F0F0F) | ((words & 0x0F0F0F0F) << 4), scales
    if kind == "groups shifted":
        return words, scales.roll(1, dims=1)
    if kind == "one row lost":
        return words, scales.index_fill(0, torch.tensor([3]), 0.0)
    return words, scales.index_fill(0, torch.tensor([3]), torch.nan)


@pytest.mark.parametrize("kind", ["no offset", "nibbles swapped", "groups shifted", "one row lost", "not a number"])
@pytest.mark.parametrize("matrix", MATRICES)
def test_b145_a_wrong_product_shows(kind, matrix):
    experts, matrices = filled(ParallelState(), torch.bfloat16)
    matrices[matrix] = damaged(kind, *matrices[matrix])
    error = largest_error(experts, EXPERTS - 1, matrices, torch.bfloat16, top_k=2)
    assert not error <= BOUNDS[torch.bfloat16]


def test_an_expert_of_zeros_is_right_if_its_product_is_zero():
    experts, matrices = filled(ParallelState(), torch.float32)
    sound = {name: (words, torch.zeros_like(scales)) for name, (words, scales) in matrices.items()}
    assert largest_error(experts, EXPERTS - 1, sound, torch.float32, top_k=2) == float("inf")
    for parameter in experts.parameters():
        parameter.data.zero_()
    assert largest_error(experts, EXPERTS - 1, sound, torch.float32, top_k=2) == 0.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(build_checkpoint(tmp_path_factory.mktemp("checked"), SMALL))


def start(checkpoint: str, **settings) -> None:
    start_engine(EngineConfig(checkpoint, device="cpu", dtype="float32", num_threads=1, **settings))[1].close()


def test_b145_a_start_tries_one_expert_and_says_so(checkpoint, caplog):
    with caplog.at_level(logging.INFO):
        start(checkpoint)
        assert "self-test: an INT4 expert is as its matrices say" in caplog.text
        caplog.clear()
        start(checkpoint, self_test=False)
    assert "self-test" not in caplog.text


@pytest.mark.parametrize("permutation", [None, [7, 6, 5, 4, 3, 2, 1, 0]])
def test_b145_a_kernel_that_is_wrong_on_this_device_stops_the_start(checkpoint, monkeypatch, permutation):
    sound = reference.experts
    start(checkpoint, expert_map=permutation)
    monkeypatch.setattr(reference, "experts", lambda x, ids, *rest: 1.01 * sound(x, ids, *rest))
    with pytest.raises(ConfigError, match=r"self-test: the INT4 product of layer 1, expert \d on cpu is off by 0\.01"):
        start(checkpoint, expert_map=permutation)
    start(checkpoint, expert_map=permutation, self_test=False)
