"""A one-pass read of a large buffer: the bandwidth that every memory-bound kernel is measured against."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# (programs, block, loads on their way): which is best differs a little between machines and buffers.
WAYS = ((4224, 4096, 2), (4224, 2048, 2), (8448, 1024, 4))
ROUND = 4224 * 4096 * 2  # numbers; a multiple of every way's round


@triton.jit
def _stream_read(x, sums, NUM_STEPS: tl.constexpr, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Program p adds up the blocks p, p + P, p + 2P, ...; LOADS of them are on their way at a time."""
    program = tl.program_id(0)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(NUM_STEPS):
        for load in tl.static_range(LOADS):
            total += tl.load(x + offsets + load * stride)
        offsets += LOADS * stride
    tl.store(sums + program, tl.sum(total))


def stream_read(x: torch.Tensor, way: tuple[int, int, int] = WAYS[0]) -> torch.Tensor:
    """Float32 [programs], program p's share of the sum of contiguous float32 `x`.

    Raises ValueError unless x divides into whole rounds of programs * block * loads numbers."""
    num_programs, block, loads = way
    num_steps, left = divmod(x.numel(), num_programs * block * loads)
    if left:
        raise ValueError(f"{x.numel()} numbers are not whole rounds of {num_programs} x {block} x {loads}.")
    sums = torch.empty(num_programs, dtype=torch.float32, device=x.device)
    _stream_read[(num_programs,)](x, sums, NUM_STEPS=num_steps, BLOCK=block, LOADS=loads, num_warps=4)
    return sums


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options); the same code for every architecture."""
    return [
        (
            f"stream_read {block}",
            _stream_read,
            {"x": "*fp32", "sums": "*fp32"},
            {"NUM_STEPS": 29, "BLOCK": block, "LOADS": loads},
            {"num_warps": 4},
        )
        for _, block, loads in WAYS
    ]
