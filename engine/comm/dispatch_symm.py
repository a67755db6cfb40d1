"""Replicated tokens over symmetric memory: rows are pushed to the peers by the kernel that also sums and norms them.

On CPUs the same sums go over gloo, so that a world of CPU ranks shows what a world of GPUs computes. Both dispatchers
add the ranks' rounded partials in rank order in float32: they give the same bits. Shape letters as in dispatcher.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.comm import exchange, meter
from engine.comm.collectives import all_gather, all_to_all
from engine.comm.dispatch_reference import ReferenceDispatcher
from engine.comm.dispatcher import DispatchLimits, Norm
from engine.comm.parallel_state import ParallelState
from engine.comm.parts import whole
from engine.kernels.reference import add_parts


class SymmReplicatedDispatcher(exchange.OverPeerMemory, ReferenceDispatcher):
    """One shot: every rank pushes its partial rows to all ranks, and each adds them all up."""

    name = "symm_replicated"

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        super().__init__(parallel, limits)
        if exchange.uses_peer_memory(parallel):
            self._exchange = exchange.Exchange(parallel, limits)
            self._channel = self._open()
            self._exchange.ready()
            self.is_capturable = True

    def _open(self):
        return self._exchange.one_shot_channel()

    def _add(
        self, partial: torch.Tensor, residual_TD: torch.Tensor, norm: Norm, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._exchange is None:
            return super()._add(partial, residual_TD, norm, kind)
        self.parallel.meter.count(kind, (self.parallel.tp - 1) * residual_TD.nbytes)
        return exchange.one_shot(self._channel, partial, residual_TD, norm)


class SymmScatterDispatcher(SymmReplicatedDispatcher):
    """Two shots: each row's partials go to its owner, who adds, norms and pushes the result to all ranks.

    Every rank has every row between the verbs, but residuals only of the rows it owns.
    """

    name = "symm_scatter"

    def _open(self):
        return self._exchange.two_shot_channel()

    def enter(self, x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        if self.parallel.is_alone:
            return super().enter(x_TD, norm)
        return norm(x_TD), self._own(x_TD)

    def gather(self, residual_tD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if self.parallel.is_alone:
            return residual_tD
        residual_PtD, sent = all_gather(residual_tD, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        gathered_TD = residual_tD.new_empty(num_tokens, residual_tD.shape[1])
        for rank, rows_tD in enumerate(residual_PtD):
            for rows, place in self._rounds(num_tokens).rows_of(rank):
                gathered_TD[rows] = rows_tD[place]
        return gathered_TD

    def _own(self, x_TD: torch.Tensor) -> torch.Tensor:
        """This rank's rows [t, D]; zeros where the last rank has fewer."""
        rounds = self._rounds(x_TD.shape[0])
        own_tD = x_TD.new_zeros(rounds.num_own, x_TD.shape[1])
        for rows, place in rounds.rows_of(self.parallel.rank):
            own_tD[place] = x_TD[rows]
        return own_tD

    def _rounds(self, num_rows: int) -> exchange.Rounds:
        """The twin's rows all go at a time."""
        capacity = max(num_rows, 1) if self._exchange is None else self._channel.shape.capacity
        return exchange.Rounds(num_rows, capacity, self.parallel.tp)

    def _add(
        self, partial: torch.Tensor, residual_tD: torch.Tensor, norm: Norm, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.parallel.is_alone:
            return super()._add(partial, residual_tD, norm, kind)
        num_rows = partial.shape[-2]
        if self._exchange is None:
            return self._add_over_gloo(whole(partial, residual_tD.dtype), residual_tD, norm, kind)
        row_bytes = residual_tD.shape[1] * residual_tD.dtype.itemsize
        share = residual_tD.shape[0]
        self.parallel.meter.count(kind, (num_rows - share) * row_bytes + (self.parallel.tp - 1) * share * row_bytes)
        return exchange.two_shot(self._channel, partial, residual_tD, norm, num_rows)

    def _add_over_gloo(
        self, partial_TD: torch.Tensor, residual_tD: torch.Tensor, norm: Norm, kind: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, share = partial_TD.shape[0], residual_tD.shape[0]
        padded = F.pad(partial_TD, (0, 0, 0, share * self.parallel.tp - num_rows))
        parts_PtD, there = all_to_all(padded.unflatten(0, (self.parallel.tp, share)), self.parallel)
        x_tD, residual_tD = norm.add(add_parts(parts_PtD), residual_tD)
        x_PtD, back = all_gather(x_tD, self.parallel)
        self.parallel.meter.count(kind, there + back)
        return x_PtD.flatten(0, 1)[:num_rows], residual_tD
