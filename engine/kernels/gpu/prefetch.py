"""Asks for weights that are read soon into L2, from a kernel that leaves the memory idle.

At a few rows a step is a chain of small kernels: while one waits for its input, the memory could already bring what the
next ones read. At many rows the memory has no idle time, and what is asked for too early pushes other data out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 2
_ALIGNMENT = 128


@dataclass(frozen=True)
class Span:
    """Memory to ask for, in `pieces` of `piece_bytes` each; nothing where pieces is 0."""

    tensor: torch.Tensor
    num_bytes: int
    piece_bytes: int


def span_of(weight: torch.Tensor | None, num_rows: int, stand_in: torch.Tensor, num_pieces: int) -> Span:
    """`weight` in num_pieces pieces for steps of few rows; otherwise, or without a weight, nothing of `stand_in`."""
    if weight is None or num_rows > MAX_ROWS or not weight.is_cuda:
        return Span(stand_in, 0, 0)
    num_bytes = weight.nbytes // _ALIGNMENT * _ALIGNMENT
    piece = triton.cdiv(num_bytes, num_pieces * _ALIGNMENT) * _ALIGNMENT
    return Span(weight, num_bytes, min(piece, num_bytes))


@triton.jit
def ask(ptr, num_bytes, piece_bytes, first_piece, THREADS: tl.constexpr, PDL: tl.constexpr):
    """One piece a thread, from `first_piece` on; pieces past the end ask for the last one again."""
    if PDL:  # noqa: SIM102 (a compile-time condition around one of run time)
        if piece_bytes > 0:
            piece = (first_piece + tl.arange(0, THREADS)).to(tl.int64)
            offset = tl.minimum(piece * piece_bytes, num_bytes - piece_bytes)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [ptr.to(tl.pointer_type(tl.uint8)) + offset, piece_bytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
