"""Absorbed latent attention over a paged cache against the expanded form without one."""

from __future__ import annotations

import pytest
import torch

from engine.attention.backend import ATTENTION_BACKENDS
from engine.comm.parallel_state import ParallelState
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.mla import MLA
from engine.layers.rotary import RopeParameters, RotaryEmbedding
from tests.mla_layer import BLOCK, SHAPES, batch_of, build


@pytest.mark.parametrize("backend", ["reference"])
@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_several_sequences_equal_the_whole_of_each(backend, shape, q_lora_rank):
    mla = build(shape, q_lora_rank)
    rotary = RotaryEmbedding(
        mla.rope, RopeParameters(50000.0, factor=32.0, mscale_all_dim=1.0), torch.device("cpu"), ReferenceKernels()
    )
    lengths = [11, 6]
    xs = [torch.randn(n, 32, generator=torch.Generator().manual_seed(n)) for n in lengths]
    table = [[5, 1, 3], [2, 6, 0]]
    cache = torch.full((8, BLOCK, mla.kv_lora_rank + mla.rope), float("nan"))
    steps = [[(0, 0, 5)], [(0, 5, 7), (1, 0, 4)], [(0, 7, 8), (1, 4, 5)], [(1, 5, 6), (0, 8, 11)]]
    got = [torch.empty_like(x) for x in xs]
    with torch.inference_mode():
        for chunks in steps:
            x = torch.cat([xs[n][start:stop] for n, start, stop in chunks])
            batch = batch_of(table, chunks)
            out = mla(x, rotary(batch.positions_T), cache, batch, ATTENTION_BACKENDS[backend]())
            for (n, start, stop), part in zip(chunks, out.split(batch.query_lens), strict=True):
                got[n][start:stop] = part
        for x, ours in zip(xs, got, strict=True):
            expected = mla.forward_naive(x, rotary(torch.arange(len(x))))
            assert torch.allclose(ours, expected, atol=2e-4 * float(expected.abs().max()))
            assert float(expected.abs().max()) > 0.05


def test_ranks_partials_sum_to_the_whole():
    """Heads are split; each rank's partial is its heads' share of the output."""
    whole = build("true heads", 24)
    x, positions = torch.randn(7, 32, generator=torch.Generator().manual_seed(3)), torch.arange(7)
    cis = RotaryEmbedding(64, RopeParameters(10000.0), torch.device("cpu"), ReferenceKernels())(positions)
    total = torch.zeros_like(x)
    with torch.inference_mode():
        for rank in range(2):
            part = build("true heads", 24, ParallelState(rank=rank, tp=2))
            for name, spec in part.specs("").items():
                source = whole.specs("")[name]
                assert source.shape == spec.shape
                spec.store(_tensor_of(whole, name)[spec.part])
            total += part.forward_naive(x, cis)
        expected = whole.forward_naive(x, cis)
    assert torch.allclose(total, expected, atol=1e-4)


def _tensor_of(mla: MLA, name: str) -> torch.Tensor:
    """The checkpoint tensor `name`, read back from a layer that holds it whole."""
    qkv = mla.qkv_a.weight.split(mla.qkv_a.sizes)
    return {
        "q_a_proj.weight": qkv[0],
        "kv_a_proj_with_mqa.weight": qkv[1],
        "q_a_layernorm.weight": mla.q_a_layernorm.weight,
        "q_b_proj.weight": mla.q_b.weight,
        "kv_a_layernorm.weight": mla.kv_a_layernorm.weight,
        "kv_b_proj.weight": mla.kv_b.weight,
        "o_proj.weight": mla.o.weight,
    }[name]
