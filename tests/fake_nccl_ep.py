"""A stand-in for `nccl.ep` of nccl-extensions over gloo: low-latency, rank-major, outputs written in place.

Only slots that a row came to are written, in an order of their own; the others keep what they held. Shape letters:
t rows of this rank, M rows that a rank sends at most, P ranks, K experts a row, H width.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType

import torch
import torch.distributed as dist

from tests.fake_deep_ep import check, gathered

alive: list = []
"""What was created and not destroyed, in that order."""


class Algorithm(IntEnum):
    LOW_LATENCY = 0


class Layout(IntEnum):
    RANK_MAJOR = 2


class ExpertIdKind(IntEnum):
    AUTO = 0
    LOCAL = 1


class Tensor:
    def __init__(self, buffer: torch.Tensor):
        assert buffer.is_contiguous()
        self.buffer = buffer


@dataclass
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    num_topk: int = 0


@dataclass
class LayoutInfo:
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


@dataclass
class DispatchInputs:
    tokens: Tensor
    topk_weights: Tensor


@dataclass
class DispatchOutputs:
    tokens: Tensor
    topk_weights: Tensor
    topk_idx: Tensor


@dataclass
class CombineInputs:
    tokens: Tensor


@dataclass
class CombineOutputs:
    tokens: Tensor


class _Owned:
    def __init__(self):
        alive.append(self)

    def destroy(self) -> None:
        assert alive[-1] is self, "what was made last goes first"
        alive.pop()


class Communicator(_Owned):
    pass


class Group(_Owned):
    @classmethod
    def create(cls, comm: Communicator, config: GroupConfig) -> Group:
        assert comm in alive and config.num_experts % dist.get_world_size() == 0
        assert min(config.max_dispatch_tokens_per_rank, config.max_token_bytes, config.num_topk) > 0
        group = cls()
        group.config = config
        return group

    def create_handle(self, layout: Layout, topk_idx: Tensor, *, stream: int) -> Handle:
        assert self in alive and layout == Layout.RANK_MAJOR and stream is not None
        assert not any(isinstance(one, Handle) for one in alive), "handles are made before any capture, here once"
        return Handle(self.config, topk_idx)


class Handle(_Owned):
    def __init__(self, config: GroupConfig, topk_idx: Tensor):
        super().__init__()
        self.config, self.ids_tK, self.sent_slots = config, topk_idx.buffer, None

    def update(self, topk_idx: Tensor, *, stream: int) -> None:
        assert self in alive and self.sent_slots is None, "a dispatch was not combined"
        check(topk_idx.buffer, torch.int64, topk_idx.buffer.shape[0], self.config.num_topk)
        assert topk_idx.buffer.shape[0] <= self.config.max_dispatch_tokens_per_rank
        self.ids_tK = topk_idx.buffer

    def dispatch(
        self, inputs: DispatchInputs, outputs: DispatchOutputs, *, layout_info: LayoutInfo | None = None, stream: int
    ) -> None:
        assert layout_info.recv_topk_idx_kind == ExpertIdKind.LOCAL
        x_tH, out_PMH = inputs.tokens.buffer, outputs.tokens.buffer
        top_k, most, ranks = self.config.num_topk, self.config.max_dispatch_tokens_per_rank, dist.get_world_size()
        assert x_tH.shape[1] * x_tH.itemsize <= self.config.max_token_bytes
        check(x_tH, torch.bfloat16, self.ids_tK.shape[0], x_tH.shape[1])
        check(inputs.topk_weights.buffer, torch.float32, *self.ids_tK.shape)
        check(out_PMH, torch.bfloat16, ranks, most, x_tH.shape[1])
        check(outputs.topk_idx.buffer, torch.int64, ranks, most, top_k)
        check(outputs.topk_weights.buffer, torch.float32, ranks, most, top_k)
        held = self.config.num_experts // ranks
        first = dist.get_rank() * held
        everyone = (gathered(part) for part in (x_tH, self.ids_tK, inputs.topk_weights.buffer))
        self.sent_slots = []
        for source, (x, ids, weights) in enumerate(zip(*everyone, strict=True)):
            ids = torch.where((ids >= first) & (ids < first + held), ids - first, -1)
            rows = (ids >= 0).any(1).nonzero().flatten().flip(0)
            out_PMH[source, : len(rows)] = x[rows]
            outputs.topk_idx.buffer[source, : len(rows)] = ids[rows]
            outputs.topk_weights.buffer[source, : len(rows)] = weights[rows]
            self.sent_slots.append(rows)

    def combine(self, inputs: CombineInputs, outputs: CombineOutputs, *, stream: int) -> None:
        back_PMH, out_tH = inputs.tokens.buffer, outputs.tokens.buffer
        ranks, most = dist.get_world_size(), self.config.max_dispatch_tokens_per_rank
        check(back_PMH, torch.bfloat16, ranks, most, out_tH.shape[1])
        check(out_tH, torch.bfloat16, self.ids_tK.shape[0], out_tH.shape[1])
        slots_PM = torch.full((ranks, most), -1)
        for source, rows in enumerate(self.sent_slots):
            slots_PM[source, : len(rows)] = rows
        self.sent_slots = None
        total_tH, own = torch.zeros(out_tH.shape), dist.get_rank()
        for one_PMH, slots in zip(gathered(back_PMH), gathered(slots_PM), strict=True):
            rows = slots[own][slots[own] >= 0]
            total_tH[rows] += one_PMH[own, : len(rows)].float()
        out_tH.copy_(total_tH)


def install() -> None:
    """`import nccl.ep` and its interop give this from now on."""
    ep = ModuleType("nccl.ep")
    for kind in (Algorithm, Layout, ExpertIdKind, Tensor, GroupConfig, LayoutInfo, Group):
        setattr(ep, kind.__name__, kind)
    for kind in (DispatchInputs, DispatchOutputs, CombineInputs, CombineOutputs):
        setattr(ep, kind.__name__, kind)
    interop = ModuleType("nccl.ep.interop.torch")
    interop.get_nccl_comm_from_group = lambda group: Communicator()
    names = {"nccl": ModuleType("nccl"), "nccl.ep.interop": ModuleType("nccl.ep.interop")}
    sys.modules.update(names | {"nccl.ep": ep, "nccl.ep.interop.torch": interop})
