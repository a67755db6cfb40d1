"""Programmatic dependent launch: the next kernel starts while this one runs, and waits where it first needs its result.

Every program of every kernel calls `wait` once, before it reads or writes anything that another kernel of the step
touches; before that it may read weights alone. A program that skipped it would let a later kernel overtake an earlier
one. (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(PDL: tl.constexpr):
    """Returns when all kernels before this one have finished and their writes are visible; the next kernel may then
    become resident. Not earlier: kernels several steps ahead would take room and bandwidth from the one that runs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@lru_cache
def has_dependent_launch(device: torch.device) -> bool:
    """Compute capability 9.0 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device, evenly: bool = False) -> dict[str, bool]:
    """Keyword arguments that every launch takes: the kernel's PDL and the launcher's own flag.

    evenly: for a long kernel whose programs share out its work beforehand. It starts when all processors are free:
    placed earlier, programs crowd where there happens to be room, and the fullest processor is waited for.
    """
    on = has_dependent_launch(device) and not evenly
    return {"PDL": on, "launch_pdl": True} if on else {"PDL": False}
