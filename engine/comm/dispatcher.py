"""The one seam between attention's partial output and the next attention's input.

A dispatcher decides which rank holds which tokens there. Replicated: every rank keeps every row and dispatch carries
no bytes. Sharded: each rank owns a share of the rows. Layers call the same verbs either way and never ask which.

Shape letters: T tokens of the step, t rows this rank holds between the verbs (T or its share), R rows it computes
experts for, D model width, K experts a token.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.comm.parallel_state import ParallelState


class Norm(Protocol):
    """The norm that ends a round. weight [D] and eps: for dispatchers that apply it in a kernel of their own."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, partial: torch.Tensor, residual_tD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of residual + partial, residual + partial), the sum in the residual's type."""


@dataclass
class DispatchOutput:
    """Rows this rank computes. expert_ids_RK are local (-1 = not here), weights_RK float32; combine reads handle."""

    x_RD: torch.Tensor
    expert_ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    handle: Any


@dataclass(frozen=True)
class DispatchLimits:
    """What a dispatcher is built for: E routed experts, rows of `width` numbers of `dtype`, K experts a row, and at
    most max_tokens rows of all ranks together in a step."""

    num_experts: int
    width: int
    top_k: int
    max_tokens: int
    dtype: torch.dtype


class TokenDispatcher(Protocol):
    """Built once, collectively, as `cls(parallel, limits)`.

    shards_tokens tells how the shared expert holds its weights. local_experts: the experts whose ids the router hands
    over, counted from its start; all others are -1. is_capturable: the verbs may be captured in a CUDA graph.
    family: dispatchers of one family give the same bits.
    """

    name: str
    family: str
    shards_tokens: bool
    local_experts: range
    is_capturable: bool

    @classmethod
    def obstacle(cls, parallel: ParallelState, limits: DispatchLimits) -> str | None:
        """Why it cannot run here, a clause that follows its name, or None; asked before it is built."""

    def close(self) -> None:
        """Gives back what it holds; every rank calls it, after the last verb."""

    def failure(self) -> str | None:
        """What a kernel of its own has waited for in vain, if one has; does not wait for the device."""

    def num_held(self, num_tokens_1: torch.Tensor) -> torch.Tensor:
        """int32 [1]: how many of the rows this rank holds between the verbs are no padding, where the first
        num_tokens_1 of all rows are none."""

    def enter(self, x_TD: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of all T tokens -> (attention's input [T, D], residual [t, D])."""

    def reduce(
        self, partial_TD: torch.Tensor, residual_tD: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums attention's partial outputs over ranks, adds the residual, norms -> (x [t, D], residual [t, D]).

        A partial may come as parts [P, T, D] that are to be added up in order; so may `combine`'s.
        """

    def dispatch(self, x_tD: torch.Tensor, ids_tK: torch.Tensor, weights_tK: torch.Tensor) -> DispatchOutput:
        """Brings each row to the ranks that hold its experts. ids are counted in local_experts, weights float32."""

    def spread(self, x_tD: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Brings every row to every rank, for a dense layer sliced over all ranks -> (x [R, D], handle)."""

    def combine(
        self,
        partial_RD: torch.Tensor,
        handle: Any,
        residual_tD: torch.Tensor,
        norm: Norm,
        shared_tD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums the rows' partials over ranks, adds the shared expert's output and the residual, applies the next norm.

        Returns (attention's input [T, D], residual [t, D]).
        """

    def gather(self, residual_tD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The residuals of all T = num_tokens tokens on every rank, [T, D]."""


class HoldsNothing:
    """What a dispatcher says that runs everywhere and has nothing to give back."""

    @classmethod
    def obstacle(cls, parallel: ParallelState, limits: DispatchLimits) -> str | None:
        return None

    def close(self) -> None:
        pass

    def failure(self) -> str | None:
        return None


DISPATCHERS: dict[str, tuple[str, str]] = {
    "reference": ("engine.comm.dispatch_reference", "ReferenceDispatcher"),
    "allreduce": ("engine.comm.dispatch_reference", "AllReduceDispatcher"),
    "nccl_agrs": ("engine.comm.dispatch_nccl", "GatherScatterDispatcher"),
    "nccl_a2a": ("engine.comm.dispatch_nccl", "AllToAllDispatcher"),
    "symm_replicated": ("engine.comm.dispatch_symm", "SymmReplicatedDispatcher"),
    "symm_scatter": ("engine.comm.dispatch_symm", "SymmScatterDispatcher"),
    "symm_sharded": ("engine.comm.dispatch_symm_sharded", "SymmShardedDispatcher"),
    "deepep": ("engine.comm.dispatch_deepep", "DeepEpDispatcher"),
    "nccl_ep": ("engine.comm.dispatch_nccl_ep", "NcclEpDispatcher"),
}
"""Name -> (module, class), imported where it is asked for."""


def dispatcher_class(name: str) -> type[TokenDispatcher]:
    module, attribute = DISPATCHERS[name]
    return getattr(importlib.import_module(module), attribute)


def build(name: str, parallel: ParallelState, limits: DispatchLimits) -> TokenDispatcher:
    """Collective. Raises ValueError with the reason where the dispatcher cannot run."""
    reason = dispatcher_class(name).obstacle(parallel, limits)
    if reason is not None:
        raise ValueError(f"moe_comm={name!r} {reason}; use one of the others or leave it out.")
    return dispatcher_class(name)(parallel, limits)
