"""The few collectives the layers and dispatchers are made of. Each tells the bytes that this rank sends.

A rank that is alone, in its world or as a share of one, does nothing and counts nothing sent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from engine.comm.parallel_state import ParallelState
from engine.kernels.reference import add_parts

# torch 2.13 renamed them; 2.11 has the old names alone.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_Collective = Callable[[torch.Tensor, ParallelState], tuple[torch.Tensor, int]]


def _clocked(collective: _Collective) -> _Collective:
    """Times it for the meter where the host waits for its end, as it does on a CPU."""

    @functools.wraps(collective)
    def run(x: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
        if parallel.is_alone or x.device.type != "cpu":
            return collective(x, parallel)
        with parallel.meter.clock():
            return collective(x, parallel)

    return run


@_clocked
def all_reduce(x: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """Sum over all ranks, in place. Returns (x, bytes sent: a ring moves 2 (P-1)/P of the tensor)."""
    if parallel.is_alone:
        return x, 0
    parallel.meter.calls += 1
    dist.all_reduce(x, group=parallel.group)
    return x, 2 * (parallel.tp - 1) * x.nbytes // parallel.tp


@_clocked
def all_gather(x: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """Stacks every rank's x: [P, *x.shape], in rank order ([1, *x.shape] alone). Returns (stack, bytes sent)."""
    if parallel.is_alone:
        return x.unsqueeze(0), 0
    out = torch.empty(parallel.tp, *x.shape, dtype=x.dtype, device=x.device)
    parallel.meter.calls += 1
    _all_gather_single(out.flatten(0, 1) if x.dim() else out, x.contiguous(), group=parallel.group)
    return out, (parallel.tp - 1) * x.nbytes


@_clocked
def all_to_all(x_P: torch.Tensor, parallel: ParallelState) -> tuple[torch.Tensor, int]:
    """x_P[r] goes to rank r; row r of the result came from rank r. Returns (received, bytes sent)."""
    if parallel.is_alone:
        return x_P, 0
    out = torch.empty_like(x_P)
    parallel.meter.calls += 1
    dist.all_to_all_single(out, x_P.contiguous(), group=parallel.group)
    return out, (parallel.tp - 1) * x_P.nbytes // parallel.tp


def are_capturable(parallel: ParallelState) -> bool:
    """Whether the collectives above may be captured in a CUDA graph: NCCL's may, and none needs no more."""
    return parallel.is_alone or (parallel.device.type == "cuda" and dist.get_backend(parallel.group) == "nccl")


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
    parallel.meter.calls += 1
    _reduce_scatter_single(out, x_P.flatten(0, 1).contiguous(), group=parallel.group)
    return out, (parallel.tp - 1) * x_P.nbytes // parallel.tp


def agree_on_minimum(value: int, parallel: ParallelState) -> int:
    """The smallest `value` of all ranks, the same on each."""
    if parallel.is_alone:
        return value
    smallest = torch.tensor(value, dtype=torch.int64, device=parallel.device)
    parallel.meter.calls += 1
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=parallel.group)
    return int(smallest)


def gather_json(value: Any, parallel: ParallelState) -> list[Any]:
    """Every rank's `value`, in rank order, the same list on each. Values are JSON's own, of any size; not for use in a
    captured step."""
    text = json.dumps(value).encode()
    if parallel.is_alone:
        return [json.loads(text)]
    device = parallel.device
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = all_gather(length, parallel)[0].flatten().tolist()
    padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8).to(device)
    rows = all_gather(padded, parallel)[0].cpu()
    return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]


class RankError(RuntimeError):
    """What was to be done together failed on a rank; raised on every rank alike."""


def together(function: Callable[[], Any], parallel: ParallelState) -> list[Any]:
    """What `function` returns on every rank, in rank order, as JSON values; every rank calls it at the same point.

    Raises RankError on every rank, with the first failing rank and its reason, where it raises on any: ranks then go
    on alike. A rank that waits inside `function` for another that has failed is its own affair.
    """
    mine, failure, cause = None, None, None
    try:
        mine = function()
    except RankError as error:
        cause, failure = error, str(error)
    except Exception as error:
        cause, failure = error, f"rank {parallel.rank}: {type(error).__name__}: {error}"
    outcomes = gather_json([mine, failure], parallel)
    for _, reason in outcomes:
        if reason is not None:
            raise RankError(reason) from cause
    return [value for value, _ in outcomes]
