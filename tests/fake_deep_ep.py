"""A stand-in for `deep_ep` over gloo, which asserts what the library asserts of its arguments.

Rows nothing came to hold NaN, so that a reader of one shows. Shape letters: t rows of this rank, P ranks, E experts,
K experts a row, H width, R rows received.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

alive: list = []
"""Buffers that were built and not destroyed."""


def install(interface: str) -> None:
    """`import deep_ep` gives a module with this one of "Buffer" and "ElasticBuffer" from now on."""
    module = ModuleType("deep_ep")
    setattr(module, interface, {"Buffer": Buffer, "ElasticBuffer": ElasticBuffer}[interface])
    module.topk_idx_t = torch.int64
    sys.modules["deep_ep"] = module


def check(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous(), (tensor, dtype, shape)


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's x; float32 carries bfloat16 whole."""
    sent = x.float() if x.dtype == torch.bfloat16 else x.contiguous()
    everyone = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, sent)
    return [one.to(x.dtype) for one in everyone]


class _Rows:
    """The rows that came to this rank, in order of their owners, and the way back."""

    def __init__(self, x_tH, ids_tK, weights_tK, num_experts: int, num_rows: int, unfilled_id: int):
        self.share, self.num_rows = x_tH.shape[0], num_rows
        held = num_experts // dist.get_world_size()
        first = dist.get_rank() * held
        x, ids, weights = (torch.cat(gathered(part)) for part in (x_tH, ids_tK, weights_tK))
        ids = torch.where((ids >= first) & (ids < first + held), ids - first, -1)
        sources = (ids >= 0).any(1).nonzero().flatten()
        self.count = len(sources)
        assert self.count <= num_rows
        self.sources_R = torch.full((num_rows,), -1)
        self.sources_R[: self.count] = sources
        self.x_RH = torch.full((num_rows, x.shape[1]), torch.nan, dtype=x.dtype)
        self.ids_RK = torch.full((num_rows, ids.shape[1]), unfilled_id)
        self.weights_RK = torch.full((num_rows, ids.shape[1]), torch.nan)
        self.x_RH[: self.count], self.ids_RK[: self.count] = x[sources], ids[sources]
        self.weights_RK[: self.count] = torch.where(ids[sources] >= 0, weights[sources], 0)

    def sum_back(self, x_RH: torch.Tensor) -> torch.Tensor:
        check(x_RH, torch.bfloat16, *self.x_RH.shape)
        total_tH = torch.zeros(self.share, x_RH.shape[1])
        first = dist.get_rank() * self.share
        for one_RH, sources_R in zip(gathered(x_RH), gathered(self.sources_R), strict=True):
            mine = (sources_R >= first) & (sources_R < first + self.share)
            total_tH[sources_R[mine] - first] += one_RH[mine].float()
        return total_tH.bfloat16()


class _Owned:
    def __init__(self, explicitly_destroy: bool):
        assert explicitly_destroy
        alive.append(self)

    def destroy(self) -> None:
        alive.remove(self)


class Buffer(_Owned):
    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, explicitly_destroy=False):
        super().__init__(explicitly_destroy)
        assert group.size() in (2, 4, 8) and num_nvl_bytes > 0 and num_rdma_bytes == 0
        self.ranks = group.size()

    @staticmethod
    def get_dispatch_config(num_ranks):
        return SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, ranks: 256 * row_bytes * ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        check(topk_idx, torch.int64, *topk_idx.shape)
        assert num_experts % self.ranks == 0
        held = num_experts // self.ranks
        in_rank = torch.stack([((topk_idx >= 0) & (topk_idx // held == rank)).any(1) for rank in range(self.ranks)], 1)
        per_expert = topk_idx[topk_idx >= 0].flatten().bincount(minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
    ):
        share, width = x.shape
        check(x, torch.bfloat16, share, width)
        assert self in alive and width * x.itemsize % 16 == 0
        check(topk_idx, torch.int64, share, topk_idx.shape[1])
        check(topk_weights, torch.float32, *topk_idx.shape)
        check(num_tokens_per_rank, torch.int32, self.ranks)
        check(is_token_in_rank, torch.bool, share, self.ranks)
        num_experts = num_tokens_per_expert.shape[0]
        check(num_tokens_per_expert, torch.int32, num_experts)
        assert num_worst_tokens > 0, "without it the host would wait for the count"
        rows = _Rows(x, topk_idx, topk_weights, num_experts, num_worst_tokens, unfilled_id=-1)
        return rows.x_RH, rows.ids_RK, rows.weights_RK, [], rows, None

    def combine(self, x, handle, topk_weights=None, bias=None):
        return handle.sum_back(x), None, None


class ElasticBuffer(_Owned):
    def __init__(
        self, group, num_bytes=None, *, num_max_tokens_per_rank=0, hidden=0, num_topk=0, explicitly_destroy=False
    ):
        super().__init__(explicitly_destroy)
        self.group, self.most, self.width, self.num_topk = group, num_max_tokens_per_rank, hidden, num_topk

    def dispatch(self, x, topk_idx=None, topk_weights=None, num_experts=None, do_cpu_sync=None):
        assert self in alive and do_cpu_sync is False and x.shape[0] <= self.most
        check(x, torch.bfloat16, x.shape[0], self.width)
        check(topk_idx, torch.int64, x.shape[0], self.num_topk)
        check(topk_weights, torch.float32, x.shape[0], self.num_topk)
        rows = _Rows(x, topk_idx, topk_weights, num_experts, self.group.size() * self.most, unfilled_id=0)
        rows.psum_num_recv_tokens_per_scaleup_rank = torch.tensor([0] * (self.group.size() - 1) + [rows.count]).int()
        return rows.x_RH, rows.ids_RK, rows.weights_RK, rows, None

    def combine(self, x, handle, topk_weights=None, bias=None):
        return handle.sum_back(x), None, None
