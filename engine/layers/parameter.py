"""Parameters that know their own shard: each layer says which part of which tensor it wants and where it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from engine.loading import host_memory
from engine.loading.tensor_reader import Store
from engine.loading.weights import TensorSpec

FLOAT_TYPES = ("BF16", "F32", "F16")
WHOLE = slice(None)  # of every rank, where a rank's own slice could be as long as the whole
_LARGE_BYTES = 2**20


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Zeros. On the host they cost nothing until they are written, so that a load need not wait for pages twice."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= _LARGE_BYTES:
        zeros = host_memory.zeros(num_bytes).view(dtype).view(shape)
    else:
        zeros = torch.zeros(*shape, dtype=dtype, device=device)
    return torch.nn.Parameter(zeros, requires_grad=False)


def copy_into(target: torch.Tensor) -> Store:
    """A store that converts and copies what was read into `target`."""

    def store(value: torch.Tensor) -> None:
        target.copy_(value)

    return store


def reordered(spec: TensorSpec, order: Sequence[int]) -> TensorSpec:
    """The same tensor, read whole along its first dimension, with the file's row order[i] stored as row i."""
    rows = list(order)

    def store(value: torch.Tensor) -> None:
        spec.store(value[rows])

    return spec._replace(store=store, rows=None)


def spec(shape: tuple[int, ...], part: tuple[slice, ...], target: torch.Tensor) -> TensorSpec:
    """A float tensor of which `part` is copied into `target`, a long one in pieces. WHOLE rows are whole on every
    rank."""
    return TensorSpec(
        shape,
        FLOAT_TYPES,
        part,
        copy_into(target),
        is_everywhere=part[0] == WHOLE,
        rows=lambda rows: copy_into(target[rows]),
    )
