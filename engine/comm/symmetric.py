"""Memory on a GPU that every rank of the host can write: torch's symmetric memory, with plain peer pointers.

Building is collective. Over PCIe a write to a peer may be accepted and never seen (peer access off, IOMMU in the way),
so that whoever chooses a dispatcher tries it first.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.comm.dispatcher import DispatchLimits
from engine.comm.parallel_state import ParallelState
from engine.comm.peers import peer_obstacle

WAIT_SECONDS = 15.0  # for a rank that is late, before a kernel gives up and the engine stops
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_RANKS = 32


def obstacle(parallel: ParallelState, limits: DispatchLimits) -> str | None:
    """Why the ranks cannot exchange rows this way, a clause; None on a CPU, where twins over gloo stand in."""
    if parallel.is_alone or parallel.device.type != "cuda":
        return None
    if parallel.tp & (parallel.tp - 1) or parallel.tp > _MOST_RANKS:
        return f"needs 2, 4, 8, 16 or {_MOST_RANKS} ranks, not {parallel.tp}"
    if limits.dtype not in _DTYPES:
        return f"exchanges bfloat16, float16 or float32, not {limits.dtype}"
    return peer_obstacle(parallel)


class PeerMemory:
    """`num_bytes` on each rank. local: this rank's, uint8. addresses_1P: int64, where each rank's begin, as this rank
    reaches them."""

    def __init__(self, parallel: ParallelState, num_bytes: int):
        from torch.distributed import _symmetric_memory as symmetric

        group = parallel.group or dist.group.WORLD
        self.local = symmetric.empty(-(-num_bytes // 16) * 16, dtype=torch.uint8, device=parallel.device)
        self._handle = symmetric.rendezvous(self.local, group.group_name)
        self.addresses_1P = torch.tensor([list(self._handle.buffer_ptrs)], dtype=torch.int64, device=parallel.device)
