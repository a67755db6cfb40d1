"""Sharded tokens over equal-split collectives: NCCL on GPUs, gloo on CPUs.

Each rank owns ceil(T / P) rows between attention and attention. Splits are equal and sizes static, so that no rank
reads a count on the host; rows past T and experts that are elsewhere are marked by expert id -1. All sums run in rank
order in float32. Shape letters as in dispatcher.py, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.comm import meter
from engine.comm.collectives import all_gather, all_to_all, are_capturable
from engine.comm.dispatcher import DispatchLimits, DispatchOutput, Norm
from engine.comm.parallel_state import ParallelState, even_slice
from engine.kernels.reference import add_parts


@dataclass(frozen=True)
class _Step:
    """How many rows this step has in all, and how many of them a rank owns."""

    num_tokens: int
    share: int


class AllToAllDispatcher:
    """Rows travel to the ranks that hold their experts and back by `all_to_all_single`."""

    name = "nccl_a2a"
    family = "sharded"
    shards_tokens = True

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        self.parallel = parallel
        self.local_experts = range(limits.num_experts)
        self.experts_per_group = len(parallel.expert_range(limits.num_experts))
        self.is_capturable = are_capturable(parallel)
        self.step = _Step(0, 0)
        self._num_held_1: torch.Tensor | None = None

    @classmethod
    def obstacle(cls, parallel: ParallelState, limits: DispatchLimits) -> str | None:
        return None

    def close(self) -> None:
        pass

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
        summed_tD, sent = self._return_rows(self._pad(_whole(partial_TD, residual_tD.dtype)))
        self.parallel.meter.count(meter.ATTENTION_REDUCE, sent)
        return norm.add(summed_tD, residual_tD)

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        first_P = torch.arange(self.parallel.ep, device=x_tD.device).repeat_interleave(self.parallel.expert_tp)
        local_PtK = ids_tK.unsqueeze(0) - (first_P * self.experts_per_group).view(-1, 1, 1)
        elsewhere_PtK = (local_PtK < 0) | (local_PtK >= self.experts_per_group) | self._past_end(x_tD)
        local_PtK = local_PtK.masked_fill(elsewhere_PtK, -1)
        everyone = (self.parallel.tp, -1, -1)
        received, sent = _exchange(
            [x_tD.expand(*everyone), local_PtK.int(), weights_tK.float().expand(*everyone)], self.parallel
        )
        self.parallel.meter.count(meter.MOE_DISPATCH, sent)
        x_RD, ids_RK, weights_RK = (part.flatten(0, 1) for part in received)
        return DispatchOutput(x_RD, ids_RK.long(), weights_RK, None)

    def spread(self, x_tD: torch.Tensor) -> tuple[torch.Tensor, None]:
        gathered_PtD, sent = all_gather(x_tD, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        return gathered_PtD.flatten(0, 1), None

    def combine(
        self,
        partial_RD: torch.Tensor,
        handle: None,
        residual_tD: torch.Tensor,
        norm: Norm,
        shared_tD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed_tD, sent_back = self._return_rows(_whole(partial_RD, residual_tD.dtype))
        if shared_tD is not None:
            summed_tD = summed_tD + shared_tD.float()
        x_tD, residual_tD = norm.add(summed_tD, residual_tD)
        x_PtD, gathered = all_gather(x_tD, self.parallel)
        self.parallel.meter.count(meter.MOE_COMBINE, sent_back + gathered)
        return x_PtD.flatten(0, 1)[: self.step.num_tokens], residual_tD

    def _return_rows(self, partial_RD: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[P * t, D] partials -> this rank's t rows, summed over ranks in rank order."""
        received_PtD, sent = all_to_all(partial_RD.unflatten(0, (self.parallel.tp, -1)), self.parallel)
        return add_parts(received_PtD), sent

    def _pad(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.pad(x_TD, (0, 0, 0, self.step.share * self.parallel.tp - x_TD.shape[0]))

    def _past_end(self, x_tD: torch.Tensor) -> torch.Tensor:
        first = self.parallel.rank * self.step.share
        rows = torch.arange(first, first + self.step.share, device=x_tD.device)
        return (rows >= self.step.num_tokens).view(1, -1, 1)


def _whole(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The partial to send, [T, D]: parts [P, T, D] are added up first."""
    return (add_parts(partial) if partial.dim() == 3 else partial).to(dtype)


def _exchange(parts: list[torch.Tensor], parallel: ParallelState) -> tuple[list[torch.Tensor], int]:
    """One all-to-all of several [P, t, *] tensors, packed side by side as bytes."""
    as_bytes = [part.contiguous().view(torch.uint8) for part in parts]
    received, sent = all_to_all(torch.cat(as_bytes, dim=-1), parallel)
    out = received.split([b.shape[-1] for b in as_bytes], dim=-1)
    return [b.contiguous().view(part.dtype) for b, part in zip(out, parts, strict=True)], sent
