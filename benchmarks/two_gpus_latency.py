"""Microseconds of every dispatcher's verbs and of plain collectives, by rows, in graphs where they may be captured."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from engine.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, build, dispatcher_class
from engine.comm.parallel_state import ParallelState

CALLS = 8  # in one graph


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Of those that are installed, and of NCCL where torch brings one."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def obstacles_of_rank(parallel: ParallelState, width: int, num_experts: int, top_k: int, dtype: str) -> dict[str, Any]:
    """Dispatcher -> why it cannot run here, or None."""
    limits = DispatchLimits(num_experts, width, top_k, 512, getattr(torch, dtype))
    return {name: dispatcher_class(name).obstacle(parallel, limits) for name in DISPATCHERS}


@torch.inference_mode()
def dispatcher_of_rank(
    parallel: ParallelState, dispatcher: str, rows: list[int], width: int, num_experts: int, top_k: int, dtype: str
) -> list[dict[str, Any]]:
    """One row for each number of rows; all ranks return the slowest rank's times."""
    from engine.comm.timing import time_dispatcher

    limits = DispatchLimits(num_experts, width, top_k, max(rows), getattr(torch, dtype))
    built = build(dispatcher, parallel, limits)
    measured = []
    for count in rows:
        times = time_dispatcher(built, count, limits, parallel)
        measured.append({"rows": count} | {f"{verb} us": 1e6 * seconds for verb, seconds in vars(times).items()})
        measured[-1]["layer us"] = 1e6 * times.layer
    built.close()
    return measured


@torch.inference_mode()
def collectives_of_rank(parallel: ParallelState, rows: list[int], width: int, dtype: str) -> list[dict[str, Any]]:
    """The library's own, each over `rows` rows of all ranks together."""
    from engine.comm.timing import time_calls

    measured = []
    for count in rows:
        share = -(-count // parallel.tp)
        kept = {"dtype": getattr(torch, dtype), "device": parallel.device}
        whole_TD = torch.zeros(count, width, **kept)
        shares_PtD = torch.zeros(parallel.tp, share, width, **kept)
        calls = {
            "all_reduce": lambda x=whole_TD: all_reduce(x, parallel),
            "all_gather": lambda x=shares_PtD[0]: all_gather(x, parallel),
            "reduce_scatter": lambda x=shares_PtD: reduce_scatter(x, parallel),
            "all_to_all": lambda x=shares_PtD: all_to_all(x, parallel),
        }
        times = {f"{name} us": 1e6 * time_calls([call] * CALLS, parallel) for name, call in calls.items()}
        measured.append({"rows": count, "bytes": whole_TD.nbytes} | times)
    return measured
