"""Replicated tokens: every rank holds every row, so dispatch carries no bytes and only sums cross ranks.

`reference` gathers all partials and adds them in rank order, which makes it the oracle: its result does not depend on
a library's reduction. `allreduce` is the baseline that general engines use. Shape letters as in dispatcher.py.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.comm import meter
from engine.comm.collectives import all_gather, all_reduce, are_capturable
from engine.comm.dispatcher import DispatchLimits, DispatchOutput, HoldsNothing, Norm
from engine.comm.parallel_state import ParallelState
from engine.comm.parts import whole
from engine.kernels.reference import add_parts


class ReferenceDispatcher(HoldsNothing):
    """All-gather of partials, summed in rank order 0..P-1 in float32 on every rank."""

    name = "reference"
    family = "rank order"
    shards_tokens = False

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        self.parallel = parallel
        self.local_experts = parallel.expert_range(limits.num_experts)
        self.is_capturable = are_capturable(parallel)

    def num_held(self, num_tokens_1: torch.Tensor) -> torch.Tensor:
        return num_tokens_1

    def enter(self, x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return norm(x_TD), x_TD

    def reduce(
        self, partial_TD: torch.Tensor, residual_TD: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add(partial_TD, residual_TD, norm, meter.ATTENTION_REDUCE)

    def dispatch(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        self.parallel.meter.count(meter.MOE_DISPATCH, 0)
        return DispatchOutput(x_TD, ids_TK, weights_TK, None)

    def spread(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return x_TD, None

    def combine(
        self,
        partial_TD: torch.Tensor,
        handle: Any,
        residual_TD: torch.Tensor,
        norm: Norm,
        shared_TD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if shared_TD is not None:
            partial_TD = whole(partial_TD) + shared_TD
        return self._add(partial_TD, residual_TD, norm, meter.MOE_COMBINE)

    def gather(self, residual_TD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        return residual_TD

    def _add(
        self, partial: torch.Tensor, residual_TD: torch.Tensor, norm: Norm, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over ranks, residual, norm: what a round of this kind ends in."""
        return norm.add(self._sum(partial, kind, residual_TD.dtype), residual_TD)

    def _sum(self, partial: torch.Tensor, kind: str, sent_as: torch.dtype) -> torch.Tensor:
        """The partials of all ranks added up; those of one rank are left as they are, in parts or not."""
        if self.parallel.is_alone:
            self.parallel.meter.count(kind, 0)
            return partial
        return self._sum_ranks(whole(partial, sent_as), kind)

    def _sum_ranks(self, partial_TD: torch.Tensor, kind: str) -> torch.Tensor:
        stack_PTD, sent = all_gather(partial_TD, self.parallel)
        self.parallel.meter.count(kind, sent)
        return add_parts(stack_PTD)


class AllReduceDispatcher(ReferenceDispatcher):
    """The baseline: local experts, then the library's all-reduce."""

    name = "allreduce"
    family = "all-reduce"

    def _sum_ranks(self, partial_TD: torch.Tensor, kind: str) -> torch.Tensor:
        summed_TD, sent = all_reduce(partial_TD.contiguous(), self.parallel)
        self.parallel.meter.count(meter.MOE_ALL_REDUCE if kind == meter.MOE_COMBINE else kind, sent)
        return summed_TD
