"""Feed-forward blocks: router, dispatch, experts, combine; and the dense first layers through the same combine.

Shape letters: T tokens, t rows this rank holds between the dispatcher's verbs, R rows it computes, D model width,
E experts, K experts a token, S shared expert columns of this rank.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.batch import ForwardBatch
from engine.comm.dispatcher import Norm, TokenDispatcher
from engine.comm.parallel_state import ParallelState
from engine.kernels.table import Kernels, Routing
from engine.layers.linear import Linear, whole
from engine.layers.parameter import WHOLE, empty, reordered, spec
from engine.layers.quant import FloatExperts
from engine.loading.weights import TensorSpec


class Router(nn.Module):
    """Chooses experts; the first half of the shared expert, which reads the same input, shares its product.

    shared: (columns of the shared expert, this rank's among them), None without one. counts_E: int64, where each
    choice of a row on this rank is counted, whichever rank holds the expert; None counts nothing. The bias stays in
    float32: rounded to bfloat16 it would reorder experts.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        scale: float,
        shared: tuple[int, slice] | None,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        counts_E: torch.Tensor | None = None,
    ):
        super().__init__()
        self.counts_E = counts_E
        self.top_k, self.normalize, self.scale, self.kernels = top_k, normalize, scale, kernels
        parts = {"gate": whole(num_experts)}
        if shared is not None:
            parts |= {"shared_experts.gate_proj": shared, "shared_experts.up_proj": shared}
        self.first = Linear(width, parts, dtype, device)
        self.bias = empty(num_experts, dtype=torch.float32, device=device)

    def forward(self, x_tD: torch.Tensor, num_tokens_1: torch.Tensor, local_experts: range) -> Routing:
        """The choice among local_experts, ids counted from their start, -1 elsewhere and on padding."""
        return self.kernels.route(
            x_tD,
            self.first.weight,
            self.bias,
            num_tokens_1,
            local_experts,
            self.top_k,
            self.normalize,
            self.scale,
            self.counts_E,
        )

    def specs(self, prefix: str, slots: tuple[int, ...] | None = None) -> dict[str, TensorSpec]:
        """slots: the expert of each of the router's rows, None for the checkpoint's order."""
        bias = spec(tuple(self.bias.shape), (WHOLE,), self.bias)
        specs = self.first.specs(prefix) | {f"{prefix}gate.e_score_correction_bias": bias}
        if slots is None:
            return specs
        names = (f"{prefix}gate.weight", f"{prefix}gate.e_score_correction_bias")
        return specs | {name: reordered(specs[name], slots) for name in names}


class DenseFeedForward(nn.Module):
    """down(silu(gate x) * up x), sliced over all ranks; its partial takes the same way back as the experts'."""

    def __init__(self, width: int, inner: int, parallel: ParallelState, dtype: torch.dtype, kernels: Kernels):
        super().__init__()
        self.kernels = kernels
        columns = parallel.split(inner, "feed-forward columns")
        part = (inner, columns)
        self.gate_up = Linear(width, {"gate_proj": part, "up_proj": part}, dtype, parallel.device)
        self.down = Linear(inner, {"down_proj": whole(width)}, dtype, parallel.device, columns)

    def forward(
        self, x_tD: torch.Tensor, residual_tD: torch.Tensor, batch: ForwardBatch, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dispatcher: TokenDispatcher = batch.dispatcher
        x_RD, handle = dispatcher.spread(x_tD)
        return dispatcher.combine(self.partial(x_RD), handle, residual_tD, norm)

    def partial(self, x_RD: torch.Tensor) -> torch.Tensor:
        """This rank's columns alone, [R, D] or parts [P, R, D] of the sum."""
        hidden = self.kernels.silu_mul(self.kernels.linear(x_RD, self.gate_up.weight))
        return self.kernels.partial(hidden, self.down.weight)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        return self.gate_up.specs(prefix) | self.down.specs(prefix)


class MoEFeedForward(nn.Module):
    """Router -> dispatch -> experts -> combine, with the shared expert on the rows this rank holds.

    shared_down: the shared expert's second half, None without one. `sums_shared`: the rows that experts compute are the
    rows this rank holds, so the router's plan is theirs and the shared expert's output is summed with theirs; otherwise
    it joins in the combine. slots: the checkpoint's expert in each place, None where each is in its own.
    """

    def __init__(
        self,
        router: Router,
        experts: FloatExperts,
        shared_down: Linear | None,
        sums_shared: bool,
        kernels: Kernels,
        slots: tuple[int, ...] | None = None,
    ):
        super().__init__()
        self.slots = slots
        self.router = router
        self.experts = experts
        self.shared_down = shared_down
        self.sums_shared, self.kernels = sums_shared, kernels

    def forward(
        self, x_tD: torch.Tensor, residual_tD: torch.Tensor, batch: ForwardBatch, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dispatcher: TokenDispatcher = batch.dispatcher
        ids_tK, weights_tK, shared_tS, plan = self.router(
            x_tD, dispatcher.num_held(batch.num_tokens_1), dispatcher.local_experts
        )
        sent = dispatcher.dispatch(x_tD, ids_tK, weights_tK)
        routed = (sent.x_RD, sent.expert_ids_RK, sent.weights_RK)
        if self.sums_shared:
            shared = (shared_tS, self.shared_down.weight) if self.shared_down is not None else (None, None)
            return dispatcher.combine(self.experts(*routed, *shared, plan), sent.handle, residual_tD, norm)
        if self.shared_down is None:
            return dispatcher.combine(self.experts(*routed), sent.handle, residual_tD, norm)
        shared_tD = self.kernels.linear(shared_tS, self.shared_down.weight)
        return dispatcher.combine(self.experts(*routed), sent.handle, residual_tD, norm, shared_tD)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        specs = self.router.specs(prefix, self.slots) | self.experts.specs(f"{prefix}experts.", self.slots)
        return specs if self.shared_down is None else specs | self.shared_down.specs(prefix)
