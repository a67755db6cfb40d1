"""Feed-forward blocks: router, dispatch, experts, combine; and the dense first layers through the same combine.

Shape letters: T tokens, t rows this rank holds between the dispatcher's verbs, R rows it computes, D model width,
E experts, K experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.comm.dispatcher import Norm, TokenDispatcher
from engine.comm.parallel_state import ParallelState
from engine.kernels import reference
from engine.layers.linear import Linear, whole
from engine.layers.parameter import FLOAT_TYPES, WHOLE, copy_into, empty, spec
from engine.layers.quant import FloatExperts
from engine.weights import TensorSpec


class Router(nn.Module):
    """Scores in float32 throughout: a bias rounded to bfloat16 would reorder experts."""

    def __init__(self, width: int, num_experts: int, top_k: int, normalize: bool, scale: float, device: torch.device):
        super().__init__()
        self.top_k, self.normalize, self.scale = top_k, normalize, scale
        self.weight = empty(num_experts, width, dtype=torch.float32, device=device)
        self.bias = empty(num_experts, dtype=torch.float32, device=device)

    def forward(self, x_tD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_tE = F.linear(x_tD.float(), self.weight)
        return reference.route(logits_tE, self.bias, self.top_k, self.normalize, self.scale)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        return {
            f"{prefix}weight": spec(tuple(self.weight.shape), (WHOLE, WHOLE), self.weight),
            f"{prefix}e_score_correction_bias": TensorSpec(
                tuple(self.bias.shape), FLOAT_TYPES, (WHOLE,), copy_into(self.bias)
            ),
        }


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) over this rank's columns, or over all of them where `sliced` is False."""

    def __init__(self, width: int, inner: int, parallel: ParallelState, dtype: torch.dtype, sliced: bool = True):
        super().__init__()
        columns = parallel.split(inner, "feed-forward columns") if sliced else slice(0, inner)
        part = (inner, columns)
        self.gate_up = Linear(width, {"gate_proj": part, "up_proj": part}, dtype, parallel.device)
        self.down = Linear(inner, {"down_proj": whole(width)}, dtype, parallel.device, columns)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down(reference.silu_mul(self.gate_up(x_TD)))

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        return self.gate_up.specs(prefix) | self.down.specs(prefix)


class DenseFeedForward(nn.Module):
    """A dense layer sliced over all ranks whose partial takes the same way back as the experts'."""

    def __init__(self, mlp: SwiGLU):
        super().__init__()
        self.mlp = mlp

    def forward(
        self, x_tD: torch.Tensor, residual_tD: torch.Tensor, dispatcher: TokenDispatcher, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_RD, handle = dispatcher.spread(x_tD)
        return dispatcher.combine(self.mlp(x_RD), handle, residual_tD, norm)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        return self.mlp.specs(prefix)


class MoEFeedForward(nn.Module):
    """Router -> dispatch -> experts -> combine, with the shared expert on the rows this rank holds.

    The shared expert is sliced where every rank holds every row, and whole where rows are sharded.
    """

    def __init__(self, router: Router, experts: FloatExperts, shared_experts: SwiGLU | None):
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_experts = shared_experts

    def forward(
        self, x_tD: torch.Tensor, residual_tD: torch.Tensor, dispatcher: TokenDispatcher, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids_tK, weights_tK = self.router(x_tD)
        sent = dispatcher.dispatch(x_tD, ids_tK, weights_tK)
        partial_RD = self.experts(sent.x_RD, sent.expert_ids_RK, sent.weights_RK)
        shared_tD = self.shared_experts(x_tD) if self.shared_experts is not None else None
        return dispatcher.combine(partial_RD, sent.handle, residual_tD, norm, shared_tD)

    def specs(self, prefix: str) -> dict[str, TensorSpec]:
        specs = self.router.specs(f"{prefix}gate.") | self.experts.specs(f"{prefix}experts.")
        if self.shared_experts is not None:
            specs |= self.shared_experts.specs(f"{prefix}shared_experts.")
        return specs
