"""A partial sum that comes in parts, as one tensor."""

from __future__ import annotations

import torch

from engine.kernels.reference import add_parts


def whole(partial: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[T, D] in `dtype` or as it is: parts [S, T, D] are added up first, in order, in float32."""
    if partial.dim() == 2:
        return partial if dtype is None else partial.to(dtype)
    if partial.is_cuda:
        from engine.kernels.gpu.norm import sum_parts

        return sum_parts(partial, dtype or torch.float32)
    return add_parts(partial).to(dtype or torch.float32)
