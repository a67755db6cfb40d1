"""Sharded tokens whose rows to experts and back go through `nccl.ep` of nccl-extensions, low-latency and rank-major.

It needs GPUs that reach each other's memory, over NVLink or PCIe, and a newer NCCL than some builds of torch bring.
Written against the published interface of nccl-extensions 0.1.0 and tested against a stand-in for it: it has never run
against the library. Shape letters as in dispatcher.py, P ranks, M rows that a rank owns at most.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from engine.comm.dispatcher import DispatchLimits, DispatchOutput
from engine.comm.library_exchange import LibraryExchange, copied_rows
from engine.comm.parallel_state import ParallelState

MIN_NCCL = (2, 29, 2)


@dataclass(frozen=True)
class _Sent:
    """How many rows each rank owns in this step, and the routing, which the library reads until it has combined."""

    share: int
    ids_tK: torch.Tensor


class NcclEpDispatcher(LibraryExchange):
    """One communicator, group and handle of its own, made here once; a step only gives the handle its routing, so
    that it may be captured. A capture must hold dispatch and combine in pairs, which whole steps do."""

    name = "nccl_ep"
    family = "nccl_ep"

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        super().__init__(parallel, limits)
        self._ep = ep = importlib.import_module("nccl.ep")
        interop = importlib.import_module("nccl.ep.interop.torch")
        self._comm = interop.get_nccl_comm_from_group(self.group)
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.LOW_LATENCY,
            num_experts=limits.num_experts,
            max_dispatch_tokens_per_rank=self.max_share,
            max_token_bytes=limits.width * limits.dtype.itemsize,
            num_topk=limits.top_k,
        )
        self._group = ep.Group.create(self._comm, config)
        most, kept = (parallel.tp, self.max_share), {"device": parallel.device}
        self._x_PMD = torch.zeros(*most, limits.width, dtype=limits.dtype, **kept)
        self._back_PMD = torch.zeros_like(self._x_PMD)
        self._weights_PMK = torch.zeros(*most, limits.top_k, dtype=torch.float32, **kept)
        self._ids_PMK = torch.full((*most, limits.top_k), -1, dtype=torch.int64, **kept)
        nowhere_MK = torch.full((self.max_share, limits.top_k), -1, dtype=torch.int64, **kept)
        self._handle = self._group.create_handle(ep.Layout.RANK_MAJOR, ep.Tensor(nowhere_MK), stream=self._stream())

    @classmethod
    def library_obstacle(cls, parallel: ParallelState) -> str | None:
        version = torch.cuda.nccl.version()
        if version < MIN_NCCL:
            return f"needs NCCL {_dotted(MIN_NCCL)} or newer, and this torch has {_dotted(version)}"
        try:
            importlib.import_module("nccl.ep")
        except (ImportError, OSError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return f"needs the package nccl-extensions, whose nccl.ep does not import here ({reason})"
        return None

    def close(self) -> None:
        self._handle.destroy()
        self._group.destroy()
        self._comm.destroy()

    def _exchange(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        """Ids are wiped before each dispatch, since rows that nothing comes to keep theirs."""
        ep, share = self._ep, x_tD.shape[0]
        self._ids_PMK.fill_(-1)
        self._handle.update(ep.Tensor(ids_tK), stream=self._stream())
        self._handle.dispatch(
            ep.DispatchInputs(tokens=ep.Tensor(x_tD), topk_weights=ep.Tensor(weights_tK)),
            ep.DispatchOutputs(
                tokens=ep.Tensor(self._x_PMD),
                topk_weights=ep.Tensor(self._weights_PMK),
                topk_idx=ep.Tensor(self._ids_PMK),
            ),
            layout_info=ep.LayoutInfo(recv_topk_idx_kind=ep.ExpertIdKind.LOCAL),
            stream=self._stream(),
        )
        x_RD, ids_RK, weights_RK = (
            part[:, :share].flatten(0, 1) for part in (self._x_PMD, self._ids_PMK, self._weights_PMK)
        )
        return DispatchOutput(x_RD, ids_RK, weights_RK, _Sent(share, ids_tK))

    def _experts_sum(self, partial_RD: torch.Tensor, handle: _Sent) -> tuple[torch.Tensor, int]:
        """A row's experts here are added already, weights applied; the library adds over ranks. A row that went
        nowhere gets zeros."""
        ep = self._ep
        partial_PtD = partial_RD.unflatten(0, (self.parallel.tp, handle.share))
        back_PMD = copied_rows(partial_PtD, self._back_PMD, (slice(None), slice(handle.share)))
        summed_tD = partial_RD.new_zeros(handle.share, partial_RD.shape[1])
        self._handle.combine(
            ep.CombineInputs(tokens=ep.Tensor(back_PMD)),
            ep.CombineOutputs(tokens=ep.Tensor(summed_tD)),
            stream=self._stream(),
        )
        return summed_tD, self._most_rows(summed_tD) * summed_tD.shape[1] * summed_tD.itemsize

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.parallel.device).cuda_stream


def _dotted(version: tuple[Any, ...]) -> str:
    return ".".join(map(str, version))
