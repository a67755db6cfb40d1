"""Runs a function of a test module on several processes that are joined by gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.comm.parallel_state import ParallelState

LIMIT = timedelta(seconds=60)


def _rank(rank: int, tp: int, ep: int, directory: str, function: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", tp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=LIMIT)
    torch.save(function(ParallelState(rank, tp, ep), *arguments), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def on_ranks(tp: int, directory: Path, function: Callable[..., Any], *arguments: Any, ep: int | None = None) -> list:
    """`function(parallel, *arguments)` on `tp` processes: what each rank returned, in rank order. ep is tp if left
    out. A function of a module; what it returns is tensors and plain values."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ranks = [
        context.Process(target=_rank, args=(rank, tp, ep or tp, str(directory), function, arguments))
        for rank in range(tp)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT.total_seconds() * 2)
            assert process.exitcode == 0, f"a rank of {tp} ended with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
    return [torch.load(directory / f"{rank}.pt") for rank in range(tp)]
