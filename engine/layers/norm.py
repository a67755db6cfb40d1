"""RMSNorm with the checkpoint's rounding order, alone or after a residual sum."""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels.table import Kernels
from engine.layers.parameter import WHOLE, empty, spec
from engine.loading.weights import TensorSpec


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device, kernels: Kernels):
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.weight = empty(width, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, partial: torch.Tensor, residual_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of residual + partial, residual + partial); partial is [T, D], or parts [P, T, D] of a sum."""
        return self.kernels.add_norm(partial, residual_TD, self.weight, self.eps)

    def specs(self, name: str) -> dict[str, TensorSpec]:
        return {f"{name}.weight": spec(tuple(self.weight.shape), (WHOLE,), self.weight)}
