"""What the dispatchers over an expert-parallel library share: whole experts, bfloat16 rows, GPUs that reach each other.

Attention's sums, the dense layers' and the last gather go through torch.distributed as in `nccl_agrs`; the library
carries rows to the ranks that hold their experts, each row once a rank, and the sums of their outputs back. How many
rows it carries is known on the device alone, so the meter is told the most that it may be.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from engine.comm import meter
from engine.comm.dispatcher import DispatchLimits, DispatchOutput
from engine.comm.parallel_state import ParallelState
from engine.comm.peers import peer_obstacle
from engine.comm.sharded_rows import ShardedRows

MAX_TOP_K = 32  # one lane of a warp an expert, in all of these libraries
ROW_ALIGNMENT = 16  # bytes


class LibraryExchange(ShardedRows):
    """A subclass has `_exchange(x, ids, weights) -> DispatchOutput` with a handle that is not None, and
    `_experts_sum`."""

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        super().__init__(parallel, limits)
        self.limits = limits
        self.group = parallel.group or dist.group.WORLD
        self.max_share = -(-limits.max_tokens // parallel.tp)

    @classmethod
    def obstacle(cls, parallel: ParallelState, limits: DispatchLimits) -> str | None:
        return peer_obstacle(parallel) or placement_obstacle(parallel, limits) or cls.library_obstacle(parallel)

    @classmethod
    @abstractmethod
    def library_obstacle(cls, parallel: ParallelState) -> str | None:
        """Why the library itself cannot run here, a clause, or None."""

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        sent = self._exchange(x_tD.contiguous(), ids_tK.long().contiguous(), weights_tK.float().contiguous())
        row = x_tD.shape[1] * x_tD.itemsize + ids_tK.shape[1] * (torch.int64.itemsize + torch.float32.itemsize)
        self.parallel.meter.count(meter.MOE_DISPATCH, self._most_rows(x_tD) * row)
        return sent

    @abstractmethod
    def _exchange(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        """Rows to the ranks of their experts, by the library."""

    @abstractmethod
    def _experts_sum(self, partial_RD: torch.Tensor, handle: Any) -> tuple[torch.Tensor, int]:
        """The partials of the rows that `_exchange` brought here under this handle, as `_sum_rows` returns them."""

    def _returned(self, partial_RD: torch.Tensor, handle: Any) -> tuple[torch.Tensor, int]:
        return super()._returned(partial_RD, handle) if handle is None else self._experts_sum(partial_RD, handle)

    def _most_rows(self, x_tD: torch.Tensor) -> int:
        """That this rank may send to others: each of its rows to all of them."""
        return (self.parallel.tp - 1) * x_tD.shape[0]


def placement_obstacle(parallel: ParallelState, limits: DispatchLimits) -> str | None:
    """Why rows of these limits cannot go to whole experts on these ranks, a clause, or None."""
    if parallel.is_alone:
        return "exchanges rows between ranks, and there is no other rank"
    if parallel.ep != parallel.tp:
        return f"places whole experts, so it needs ep={parallel.tp} with tp={parallel.tp}, not ep={parallel.ep}"
    if limits.dtype != torch.bfloat16:
        return f"carries bfloat16, not {str(limits.dtype).removeprefix('torch.')}"
    if limits.top_k > MAX_TOP_K:
        return f"takes at most {MAX_TOP_K} experts a row, and the model has {limits.top_k}"
    if limits.width * limits.dtype.itemsize % ROW_ALIGNMENT:
        return f"carries rows of a multiple of {ROW_ALIGNMENT} bytes, not {limits.width * limits.dtype.itemsize}"
    return None


def copied_rows(partial_RD: torch.Tensor, target_RD: torch.Tensor, rows: Any) -> torch.Tensor:
    """target, its `rows` now those of partial; the others hold what they held, which the library does not read."""
    target_RD[rows].copy_(partial_RD)
    return target_RD
