"""RMSNorm with the checkpoint's rounding order."""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels import reference
from engine.layers.parameter import WHOLE, empty, spec
from engine.weights import TensorSpec


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = empty(width, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weight, self.eps)

    def specs(self, name: str) -> dict[str, TensorSpec]:
        return {f"{name}.weight": spec(tuple(self.weight.shape), (WHOLE,), self.weight)}
