"""A chain of reads, each at an address that the one before gave: what one read takes, wherever the memory lies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _chase(x, out, steps):
    offset = tl.load(out)
    for _ in range(steps):
        offset = tl.load(x + offset, volatile=True)
    tl.store(out, offset)


def chase(zeros_1: torch.Tensor, out_1: torch.Tensor, steps: int) -> None:
    """`steps` dependent reads of the int32 zero in zeros_1, which may lie on another device, by out_1's device."""
    _chase[(1,)](zeros_1, out_1, steps, num_warps=1)


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options); the same code for every architecture."""
    return [("chase", _chase, {"x": "*i32", "out": "*i32", "steps": "i32"}, {}, {"num_warps": 1})]
