"""Small MLA layers with random weights and batches for them."""

from __future__ import annotations

import itertools

import torch

from engine.batch import ForwardBatch
from engine.comm.parallel_state import ParallelState
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.mla import MLA

SHAPES = {
    "small": {"num_heads": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12},
    "value wider": {"num_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 20},
    "true heads": {
        "num_heads": 4,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}
BLOCK = 4


def build(shape: str, q_lora_rank: int | None, parallel: ParallelState | None = None) -> MLA:
    parallel = parallel or ParallelState()
    mla = MLA(
        hidden_size=32,
        q_lora_rank=q_lora_rank,
        norm_eps=1e-6,
        scale=0.2,
        parallel=parallel,
        dtype=torch.float32,
        kernels=ReferenceKernels(),
        **SHAPES[shape],
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in mla.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return mla


def batch_of(table, chunks: list[tuple[int, int, int]]) -> ForwardBatch:
    """chunks: (sequence, start, stop)."""
    positions = [p for _, start, stop in chunks for p in range(start, stop)]
    slots = [table[n][p // BLOCK] * BLOCK + p % BLOCK for n, start, stop in chunks for p in range(start, stop)]
    width = max(len(table[n]) for n, _, _ in chunks)
    rows = torch.tensor([table[n] + [0] * (width - len(table[n])) for n, _, _ in chunks])
    batch = batch_with(rows, [stop - start for _, start, stop in chunks], [stop for _, _, stop in chunks])
    batch.positions_T, batch.slots_T = torch.tensor(positions), torch.tensor(slots)
    return batch


def batch_with(block_table_NB: torch.Tensor, query_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    """What attention needs of a batch; token ids, positions and slots are zeros."""
    starts = [0, *itertools.accumulate(query_lens)]
    device = block_table_NB.device
    nothing = torch.zeros(starts[-1], dtype=torch.int64, device=device)

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ForwardBatch(
        nothing,
        nothing,
        nothing,
        block_table_NB,
        query_lens,
        seq_lens,
        None,
        int32(starts),
        int32(seq_lens),
        int32(starts[-1:]),
        max(query_lens),
    )
