"""What dispatchers of sharded tokens share: each rank owns ceil(T / P) rows between attention and attention.

Splits are equal and sizes static, so that no rank reads a count on the host; rows that are padding carry expert id -1.
Each row is summed by its one owner and gathered from there, so all ranks hold the same bits. Shape letters as in
dispatcher.py, P ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.comm import meter
from engine.comm.collectives import all_gather, are_capturable, reduce_scatter
from engine.comm.dispatcher import DispatchLimits, DispatchOutput, HoldsNothing, Norm
from engine.comm.parallel_state import ParallelState, even_slice
from engine.comm.parts import whole


@dataclass(frozen=True)
class _Step:
    """How many rows this step has in all, and how many of them a rank owns."""

    num_tokens: int
    share: int


class ShardedRows(HoldsNothing, ABC):
    """Every verb but `dispatch`. A subclass may say how rows come back to their owners: `_sum_rows`, `_returned`."""

    name: str
    family: str
    shards_tokens = True

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        self.parallel = parallel
        self.local_experts = range(limits.num_experts)
        self.held_experts = parallel.expert_range(limits.num_experts)
        self.is_capturable = are_capturable(parallel)
        self.step = _Step(0, 0)
        self._num_held_1: torch.Tensor | None = None

    def num_held(self, num_tokens_1: torch.Tensor) -> torch.Tensor:
        """The same tensor all through a step, made where it is first asked for."""
        if self._num_held_1 is None:
            self._num_held_1 = (num_tokens_1 - self.parallel.rank * self.step.share).clamp(0, self.step.share)
        return self._num_held_1

    def enter(self, x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        self.step, self._num_held_1 = _Step(x_TD.shape[0], -(-x_TD.shape[0] // self.parallel.tp)), None
        own = even_slice(self.step.share * self.parallel.tp, self.parallel.tp, self.parallel.rank, "rows")
        return norm(x_TD), self._pad(x_TD)[own]

    def reduce(
        self, partial_TD: torch.Tensor, residual_tD: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed_tD, sent = self._sum_rows(self._pad(whole(partial_TD, residual_tD.dtype)))
        self.parallel.meter.count(meter.ATTENTION_REDUCE, sent)
        return norm.add(summed_tD, residual_tD)

    @abstractmethod
    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        """As the protocol says."""

    def spread(self, x_tD: torch.Tensor) -> tuple[torch.Tensor, None]:
        gathered_PtD, sent = all_gather(x_tD, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        return gathered_PtD.flatten(0, 1), None

    def combine(
        self,
        partial_RD: torch.Tensor,
        handle: Any,
        residual_tD: torch.Tensor,
        norm: Norm,
        shared_tD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed_tD, sent_back = self._returned(whole(partial_RD, residual_tD.dtype), handle)
        if shared_tD is not None:
            summed_tD = summed_tD.float() + shared_tD.float()
        x_tD, residual_tD = norm.add(summed_tD, residual_tD)
        x_PtD, gathered = all_gather(x_tD, self.parallel)
        self.parallel.meter.count(meter.MOE_COMBINE, sent_back + gathered)
        return x_PtD.flatten(0, 1)[: self.step.num_tokens], residual_tD

    def gather(self, residual_tD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        residual_PtD, sent = all_gather(residual_tD, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        return residual_PtD.flatten(0, 1)[:num_tokens]

    def _sum_rows(self, partial_RD: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[P * t, D] partials of every row -> (this rank's t rows, summed over ranks; bytes sent)."""
        return reduce_scatter(partial_RD.unflatten(0, (self.parallel.tp, -1)), self.parallel)

    def _returned(self, partial_RD: torch.Tensor, handle: Any) -> tuple[torch.Tensor, int]:
        """The partials of the rows that `dispatch` or `spread` brought here under this handle, as `_sum_rows` does."""
        return self._sum_rows(partial_RD)

    def _held_ids(self, ids_RK: torch.Tensor) -> torch.Tensor:
        """Ids among all experts -> among those held here, -1 for the others."""
        local_RK = ids_RK - self.held_experts.start
        return local_RK.masked_fill((local_RK < 0) | (local_RK >= len(self.held_experts)), -1)

    def _pad(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.pad(x_TD, (0, 0, 0, self.step.share * self.parallel.tp - x_TD.shape[0]))


def pack(parts: list[torch.Tensor]) -> torch.Tensor:
    """Tensors [..., *] side by side as bytes, so that one collective carries all."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def unpack(packed: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """What `pack` packed on each rank; `like` gives the widths and types."""
    widths = [part.shape[-1] * part.itemsize for part in like]
    parts = zip(packed.split(widths, dim=-1), like, strict=True)
    return [as_bytes.contiguous().view(part.dtype) for as_bytes, part in parts]
