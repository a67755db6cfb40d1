"""What launches ask of a device; plenty of memory and one processor where there is no GPU, for the interpreter."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def block_memory(device: torch.device) -> int:
    """Bytes of shared memory a block may have."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def architecture_memory(capability: tuple[int, int]) -> int:
    """`block_memory` of an architecture: 227 KB on compute capability 9.0 and 10.0, 99 KB elsewhere."""
    return (227 if capability[0] in (9, 10) else 99) * 1024
