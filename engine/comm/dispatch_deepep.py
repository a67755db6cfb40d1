"""Sharded tokens whose rows to experts and back go through `deep_ep`: sparse, over NVLink within one host.

Two of its interfaces are taken: `Buffer`, in its normal intranode mode with `num_worst_tokens`, and `ElasticBuffer`
with `do_cpu_sync=False`. Neither reads a count on the host, so both may be captured. Written against the published
interface and tested against a stand-in for it. Shape letters as in dispatcher.py, P ranks.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from engine.comm.dispatcher import DispatchLimits, DispatchOutput
from engine.comm.library_exchange import LibraryExchange, copied_rows
from engine.comm.parallel_state import ParallelState
from engine.comm.peers import nvlink_obstacle

BUFFER_RANKS = (2, 4, 8)
BUFFER_ARCHITECTURES = (9, 10)  # majors of the compute capabilities its kernels are built for; they come without PTX
ELASTIC_ARCHITECTURE = 9
NO_NETWORK_CARD = "on a host without a network card that NCCL can drive from the GPU, set EP_DISABLE_GIN=1"


class DeepEpDispatcher(LibraryExchange):
    """Adds in the order in which `deep_ep` combines, once for each row, on its owner."""

    name = "deepep"
    family = "deepep"

    def __init__(self, parallel: ParallelState, limits: DispatchLimits):
        super().__init__(parallel, limits)
        library = _library()
        if _buffer_obstacle(library, parallel) is None:
            self._buffer: _Buffer = _IntranodeBuffer(library, self.group, limits)
        else:
            self._buffer = _ElasticBuffer(library, self.group, limits, self.max_share)

    @classmethod
    def library_obstacle(cls, parallel: ParallelState) -> str | None:
        try:
            library = _library()
        except (ImportError, OSError, AssertionError, RuntimeError) as error:
            return f"needs the package deep_ep, which does not import here ({_one_line(error)})"
        reason = _buffer_obstacle(library, parallel)
        if reason is not None:
            other = _elastic_obstacle(library, parallel)
            reason = other and (reason if other == reason else f"{reason}, and {other}")
        return reason or nvlink_obstacle(parallel)

    def close(self) -> None:
        self._buffer.destroy()

    def _exchange(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        return self._buffer.dispatch(x_tD, ids_tK, weights_tK)

    def _experts_sum(self, partial_RD: torch.Tensor, handle: Any) -> tuple[torch.Tensor, int]:
        """Top-k weights are applied already, so the library adds without them."""
        summed_tD = self._buffer.combine(partial_RD.contiguous(), handle)
        return summed_tD, self._most_rows(summed_tD) * summed_tD.shape[1] * summed_tD.itemsize


class _Buffer(Protocol):
    """One interface of the library, built collectively."""

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput: ...

    def combine(self, partial_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        """[t, D], for each row the sum over the ranks it was sent to."""

    def destroy(self) -> None: ...


class _IntranodeBuffer:
    """`Buffer`. Rows that nothing came to hold leftovers and expert ids of -1."""

    def __init__(self, library: ModuleType, group: dist.ProcessGroup, limits: DispatchLimits):
        kind, ranks = library.Buffer, group.size()
        row_bytes = limits.width * limits.dtype.itemsize
        configs = (kind.get_dispatch_config(ranks), kind.get_combine_config(ranks))
        num_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, ranks) for config in configs)
        self._buffer = kind(group, num_nvl_bytes=num_bytes, explicitly_destroy=True)
        self._ranks, self._num_experts, self._id_type = ranks, limits.num_experts, _id_type(library)

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        ids_tK = ids_tK.to(self._id_type)
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids_tK, self._num_experts)
        x_RD, ids_RK, weights_RK, _, handle, _ = self._buffer.dispatch(
            x_tD,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_tK,
            topk_weights=weights_tK,
            num_worst_tokens=self._ranks * x_tD.shape[0],
        )
        return DispatchOutput(x_RD, ids_RK.long(), weights_RK, handle)

    def combine(self, partial_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        return self._buffer.combine(partial_RD, handle)[0]

    def destroy(self) -> None:
        self._buffer.destroy()


class _ElasticBuffer:
    """`ElasticBuffer`. It receives into P * max rows, the first of which are filled; experts are given no more of them
    than the step can fill, since its layout must not change from step to step."""

    def __init__(self, library: ModuleType, group: dist.ProcessGroup, limits: DispatchLimits, max_share: int):
        try:
            self._buffer = library.ElasticBuffer(
                group,
                num_max_tokens_per_rank=max_share,
                hidden=limits.width,
                num_topk=limits.top_k,
                explicitly_destroy=True,
            )
        except (RuntimeError, AssertionError) as error:
            raise RuntimeError(f"deep_ep.ElasticBuffer failed ({_one_line(error)}); {NO_NETWORK_CARD}.") from error
        self._ranks, self._num_experts, self._id_type = group.size(), limits.num_experts, _id_type(library)
        self._back_RD: torch.Tensor | None = None

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        x_RD, ids_RK, weights_RK, handle, _ = self._buffer.dispatch(
            x_tD,
            topk_idx=ids_tK.to(self._id_type),
            topk_weights=weights_tK,
            num_experts=self._num_experts,
            do_cpu_sync=False,
        )
        if self._back_RD is None:
            self._back_RD = torch.zeros_like(x_RD)
        most = self._ranks * x_tD.shape[0]
        filled_1 = handle.psum_num_recv_tokens_per_scaleup_rank[-1:]
        empty_R1 = (torch.arange(most, device=x_tD.device) >= filled_1).unsqueeze(1)
        ids_RK = ids_RK[:most].long().masked_fill(empty_R1, -1)
        return DispatchOutput(x_RD[:most], ids_RK, weights_RK[:most], handle)

    def combine(self, partial_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        back_RD = copied_rows(partial_RD, self._back_RD, slice(partial_RD.shape[0]))
        return self._buffer.combine(back_RD, handle)[0]

    def destroy(self) -> None:
        self._buffer.destroy()


def _library() -> ModuleType:
    return importlib.import_module("deep_ep")


def _id_type(library: ModuleType) -> torch.dtype:
    """Of expert ids; older versions know one alone and do not name it."""
    return getattr(library, "topk_idx_t", torch.int64)


def _buffer_obstacle(library: ModuleType, parallel: ParallelState) -> str | None:
    if not hasattr(library, "Buffer"):
        return "finds no Buffer in this deep_ep"
    if parallel.tp not in BUFFER_RANKS:
        return f"has a Buffer for 2, 4 or 8 ranks, not {parallel.tp}"
    major, minor = torch.cuda.get_device_capability(parallel.device)
    if major not in BUFFER_ARCHITECTURES:
        return f"has a Buffer for compute capabilities 9 and 10, not {major}.{minor}"
    return None


def _elastic_obstacle(library: ModuleType, parallel: ParallelState) -> str | None:
    if not hasattr(library, "ElasticBuffer"):
        return "finds no ElasticBuffer in this deep_ep"
    major, minor = torch.cuda.get_device_capability(parallel.device)
    if major < ELASTIC_ARCHITECTURE:
        return f"has an ElasticBuffer from compute capability {ELASTIC_ARCHITECTURE} on, not for {major}.{minor}"
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
