"""Sharded tokens over symmetric memory: a row travels to the ranks that hold its experts and to no other.

On CPUs the same rows go over gloo, to every rank. Shape letters as in dispatcher.py, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.comm import exchange, meter
from engine.comm.dispatch_nccl import AllToAllDispatcher
from engine.comm.dispatcher import DispatchLimits, DispatchOutput, Norm
from engine.comm.parallel_state import ParallelState


class _Sent(NamedTuple):
    """Whose sums come back: the ids of this rank's rows among all experts, and of the rows it got among its own."""

    ids_tK: torch.Tensor
    local_ids_RK: torch.Tensor


class SymmShardedDispatcher(exchange.OverPeerMemory, AllToAllDispatcher):
    """What is sent and awaited follows from the experts' ids, so that no count is exchanged. Sums run in rank order in
    float32. The bytes counted are the most that a step may send: how many rows stay is known to the device alone."""

    name = "symm_sharded"

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        super().__init__(parallel, limits)
        if exchange.uses_peer_memory(parallel):
            self._exchange = exchange.Exchange(parallel, limits)
            self._owners = self._exchange.two_shot_channel(limits.max_tokens)
            self._back = self._exchange.two_shot_channel(limits.max_tokens)
            self._out = self._exchange.dispatch_channel(limits.max_tokens)
            self._exchange.ready()

    def reduce(self, partial: torch.Tensor, residual_tD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        if self._exchange is None:
            return super().reduce(partial, residual_tD, norm)
        row_bytes = residual_tD.shape[1] * residual_tD.dtype.itemsize
        self.parallel.meter.count(meter.ATTENTION_REDUCE, (self.parallel.tp - 1) * self.step.share * row_bytes)
        return exchange.two_shot(self._owners, partial, residual_tD, norm, self.step.num_tokens, gather=False)

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        if self._exchange is None:
            return super().dispatch(x_tD, ids_tK, weights_tK)
        from engine.kernels.gpu import channel as kernels

        row_bytes = x_tD.shape[1] * x_tD.dtype.itemsize + 8 * ids_tK.shape[1]
        self.parallel.meter.count(meter.MOE_DISPATCH, (self.parallel.tp - 1) * self.step.share * row_bytes)
        x_RD, ids_RK, weights_RK = kernels.dispatch(
            x_tD.contiguous(), ids_tK.contiguous(), weights_tK.contiguous(), self._out, self.step.num_tokens,
            **self._places(),
        )  # fmt: skip
        return DispatchOutput(x_RD, ids_RK, weights_RK, _Sent(ids_tK.contiguous(), ids_RK))

    def combine(
        self,
        partial_RD: torch.Tensor,
        handle: _Sent | None,
        residual_tD: torch.Tensor,
        norm: Norm,
        shared_tD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._exchange is None or handle is None:  # a dense layer's partials are everybody's
            return super().combine(partial_RD, handle, residual_tD, norm, shared_tD)
        from engine.kernels.gpu import channel as kernels

        row_bytes = residual_tD.shape[1] * residual_tD.dtype.itemsize
        self.parallel.meter.count(meter.MOE_COMBINE, 2 * (self.parallel.tp - 1) * self.step.share * row_bytes)
        return kernels.combine(
            partial_RD.contiguous(), handle.local_ids_RK, handle.ids_tK, shared_tD, residual_tD,
            norm.weight, norm.eps, self._back, self.step.num_tokens, **self._places(),
        )  # fmt: skip

    def _places(self) -> dict[str, int]:
        return {"experts": len(self.held_experts), "group": self.parallel.expert_tp}
