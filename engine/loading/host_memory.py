"""Large pieces of the host's memory: page-aligned zeros that cost nothing until they are written."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


def zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of this process alone, in pages of 2 MiB where the kernel has them: first writes to small ones
    take longer than reading a disk. It goes back to the system with the tensor."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that was built without: small pages then
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:num_bytes]
