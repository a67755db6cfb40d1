"""A kernel that does nothing for a while: the place of a round that is not made, or a rank that is late."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl
from engine.kernels.gpu.peer import nanoseconds


@triton.jit(do_not_specialize_on_alignment=["nanoseconds_ptr"])
def delay_kernel(nanoseconds_ptr, PDL: tl.constexpr):
    pdl.wait(PDL)
    start = nanoseconds(True)
    duration = tl.load(nanoseconds_ptr)
    while nanoseconds(True) - start < duration:
        pass


def delay(nanoseconds_1: torch.Tensor) -> None:
    """Keeps the stream busy for int64 [1] nanoseconds, read when it runs."""
    delay_kernel[(1,)](nanoseconds_1, num_warps=1, **pdl.launch_options(nanoseconds_1.device))


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options)."""
    return [("delay", delay_kernel, {"nanoseconds_ptr": "*i64"}, {"PDL": capability >= (9, 0)}, {"num_warps": 1})]
