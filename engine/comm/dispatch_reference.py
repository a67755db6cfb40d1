"""Replicated tokens: every rank holds every row, so dispatch carries no bytes and only sums cross ranks.

`reference` gathers all partials and adds them in rank order, which makes it the oracle: its result does not depend on
a library's reduction. `allreduce` is the baseline that general engines use. Shape letters as in dispatcher.py.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.comm import meter
from engine.comm.collectives import all_gather, all_reduce
from engine.comm.dispatcher import DispatchOutput, Norm, add_norm
from engine.comm.parallel_state import ParallelState


class ReferenceDispatcher:
    """All-gather of partials, summed in rank order 0..P-1 in float32 on every rank."""

    name = "reference"
    shards_tokens = False
    is_capturable = True

    def __init__(self, parallel: ParallelState, num_experts: int):
        self.parallel = parallel
        self.local_experts = parallel.expert_range(num_experts)

    def enter(self, x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return norm(x_TD), x_TD

    def reduce(
        self, partial_TD: torch.Tensor, residual_TD: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_norm(self._sum(partial_TD, meter.ATTENTION_REDUCE), residual_TD, norm)

    def dispatch(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> DispatchOutput:
        self.parallel.meter.count(meter.MOE_DISPATCH, 0)
        local = self.local_experts
        local_ids_TK = ids_TK - local.start
        if self.parallel.ep > 1:
            elsewhere = (ids_TK < local.start) | (ids_TK >= local.stop)
            local_ids_TK = local_ids_TK.masked_fill(elsewhere, -1)
        return DispatchOutput(x_TD, local_ids_TK, weights_TK, None)

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
        partial_TD = partial_TD.to(residual_TD.dtype)
        if shared_TD is not None:
            partial_TD = partial_TD + shared_TD
        return add_norm(self._sum(partial_TD, meter.MOE_COMBINE), residual_TD, norm)

    def _sum(self, partial_TD: torch.Tensor, kind: str) -> torch.Tensor:
        stack_PTD, sent = all_gather(partial_TD, self.parallel)
        self.parallel.meter.count(kind, sent)
        return stack_PTD[0] if self.parallel.tp == 1 else sum_in_rank_order(stack_PTD)


class AllReduceDispatcher(ReferenceDispatcher):
    """The baseline: local experts, then the library's all-reduce."""

    name = "allreduce"

    def _sum(self, partial_TD: torch.Tensor, kind: str) -> torch.Tensor:
        summed_TD, sent = all_reduce(partial_TD.contiguous(), self.parallel)
        self.parallel.meter.count(meter.MOE_ALL_REDUCE if kind == meter.MOE_COMBINE else kind, sent)
        return summed_TD


def sum_in_rank_order(stack_PTD: torch.Tensor) -> torch.Tensor:
    """Float32 sum over the first dimension in index order, the same bits on every rank."""
    total_TD = stack_PTD[0].float()
    for part_TD in stack_PTD[1:]:
        total_TD = total_TD + part_TD.float()
    return total_TD
