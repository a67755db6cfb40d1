"""The one seam between attention's partial output and the next attention's input.

A dispatcher decides which rank holds which tokens there. Replicated: every rank keeps every row and dispatch carries
no bytes. Sharded: each rank owns a share of the rows. Layers call the same verbs either way and never ask which.

Shape letters: T tokens of the step, t rows this rank holds between the verbs (T or its share), R rows it computes
experts for, D model width, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.comm.parallel_state import ParallelState


class Norm(Protocol):
    """The norm that ends a round."""

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


class TokenDispatcher(Protocol):
    """Built once, collectively, by the model runner.

    shards_tokens tells how the shared expert holds its weights. local_experts: the experts whose ids the router hands
    over, counted from its start; all others are -1. is_capturable: the verbs may be captured in a CUDA graph.
    """

    name: str
    shards_tokens: bool
    local_experts: range
    is_capturable: bool

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


def _reference(parallel: ParallelState, num_experts: int) -> TokenDispatcher:
    from engine.comm.dispatch_reference import ReferenceDispatcher

    return ReferenceDispatcher(parallel, num_experts)


def _allreduce(parallel: ParallelState, num_experts: int) -> TokenDispatcher:
    from engine.comm.dispatch_reference import AllReduceDispatcher

    return AllReduceDispatcher(parallel, num_experts)


def _nccl_a2a(parallel: ParallelState, num_experts: int) -> TokenDispatcher:
    from engine.comm.dispatch_nccl import AllToAllDispatcher

    return AllToAllDispatcher(parallel, num_experts)


DISPATCHERS: dict[str, Callable[[ParallelState, int], TokenDispatcher]] = {
    "reference": _reference,
    "allreduce": _allreduce,
    "nccl_a2a": _nccl_a2a,
}


def choose(name: str, parallel: ParallelState) -> str:
    """The dispatcher that `auto` stands for: a rank that is alone needs no exchange, several share by all-reduce."""
    if name != "auto":
        return name
    return "reference" if parallel.is_alone else "allreduce"
