"""Sharded tokens over torch.distributed alone: NCCL on GPUs, gloo on CPUs. Shape letters as in dispatcher.py, P ranks.

Both carry each row to every rank, as equal splits must; which is faster is for a measurement to say.
"""

from __future__ import annotations

import torch

from engine.comm import meter
from engine.comm.collectives import all_gather, all_to_all
from engine.comm.dispatcher import DispatchOutput
from engine.comm.sharded_rows import ShardedRows, pack, unpack
from engine.kernels.reference import add_parts


class AllToAllDispatcher(ShardedRows):
    """Rows travel to the ranks that hold their experts and back by `all_to_all_single`. All sums run in rank order in
    float32."""

    name = "nccl_a2a"
    family = "sharded"

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        everyone = (self.parallel.tp, -1, -1)
        parts = [x_tD, self._ids_of_groups(ids_tK).int(), weights_tK.float()]
        parts = [part.expand(everyone) for part in parts]
        received, sent = all_to_all(pack(parts), self.parallel)
        self.parallel.meter.count(meter.MOE_DISPATCH, sent)
        x_RD, ids_RK, weights_RK = (part.flatten(0, 1) for part in unpack(received, parts))
        return DispatchOutput(x_RD, ids_RK.long(), weights_RK, None)

    def _ids_of_groups(self, ids_tK: torch.Tensor) -> torch.Tensor:
        """[P, t, K]: the ids as the rank that gets them counts its experts, -1 for those it does not hold."""
        size = len(self.held_experts)
        first_P = torch.arange(self.parallel.ep, device=ids_tK.device).repeat_interleave(self.parallel.expert_tp) * size
        local_PtK = ids_tK.unsqueeze(0) - first_P.view(-1, 1, 1)
        return local_PtK.masked_fill((local_PtK < 0) | (local_PtK >= size), -1)

    def _sum_rows(self, partial_RD: torch.Tensor) -> tuple[torch.Tensor, int]:
        received_PtD, sent = all_to_all(partial_RD.unflatten(0, (self.parallel.tp, -1)), self.parallel)
        return add_parts(received_PtD), sent


class GatherScatterDispatcher(ShardedRows):
    """An all-gather brings every row to every rank, a reduce-scatter sums them back; it adds in the library's order and
    type."""

    name = "nccl_agrs"
    family = "reduce-scatter"

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        parts = [x_tD, ids_tK.int(), weights_tK.float()]
        gathered, sent = all_gather(pack(parts), self.parallel)
        self.parallel.meter.count(meter.MOE_DISPATCH, sent)
        x_RD, ids_RK, weights_RK = (part.flatten(0, 1) for part in unpack(gathered, parts))
        return DispatchOutput(x_RD, self._held_ids(ids_RK.long()), weights_RK, None)
