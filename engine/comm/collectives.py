"""The few collectives the layers and dispatchers are made of. Each counts the bytes that this rank sends.

A rank that is alone, in its world or as a share of one, does nothing and counts nothing sent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.comm.parallel_state import ParallelState
from engine.kernels.reference import add_parts

# torch 2.13 renamed them; 2.11 has the old names alone.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """Sum over all ranks, in place. Returns (x, bytes sent: a ring moves 2 (P-1)/P of the tensor)."""
    if parallel.is_alone:
        return x, 0
    dist.all_reduce(x, group=parallel.group)
    return x, 2 * (parallel.tp - 1) * x.nbytes // parallel.tp


def all_gather(x: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """Stacks every rank's x: [P, *x.shape], in rank order ([1, *x.shape] alone). Returns (stack, bytes sent)."""
    if parallel.is_alone:
        return x.unsqueeze(0), 0
    out = torch.empty(parallel.tp, *x.shape, dtype=x.dtype, device=x.device)
    _all_gather_single(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=parallel.group)
    return out, (parallel.tp - 1) * x.nbytes


def all_to_all(x_P: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """x_P[r] goes to rank r; row r of the result came from rank r. Returns (received, bytes sent)."""
    if parallel.is_alone:
        return x_P, 0
    out = torch.empty_like(x_P)
    dist.all_to_all_single(out, x_P.contiguous(), group=parallel.group)
    return out, (parallel.tp - 1) * x_P.nbytes // parallel.tp


def reduce_scatter(x_P: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """Row r of the sum of all ranks' x_P goes to rank r, in x_P's type. Returns (own row, bytes sent: a ring's).

    Without NCCL it is an all-to-all whose parts are added in rank order: gloo's own reduces whole tensors.
    """
    if parallel.is_alone:
        return x_P[0], 0
    if x_P.device.type != "cuda":
        received_P, sent = all_to_all(x_P, parallel)
        return add_parts(received_P).to(x_P.dtype), sent
    out = torch.empty_like(x_P[0])
    _reduce_scatter_single(out, x_P.flatten(0, 1).contiguous(), group=parallel.group)
    return out, (parallel.tp - 1) * x_P.nbytes // parallel.tp


def agree_on_minimum(value: int, parallel: ParallelState) -> int:
    """The smallest `value` of all ranks, the same on each."""
    if parallel.is_alone:
        return value
    smallest = torch.tensor(value, dtype=torch.int64, device=parallel.device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=parallel.group)
    return int(smallest)
