"""Engine cores of several gloo ranks without a launcher: each rank runs the same requests through a core of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner

LIMIT = timedelta(seconds=60)


def build_core(config: EngineConfig, rank: int = 0) -> EngineCore:
    """One rank's, with rank 0's side of it on every rank and nothing told to the others."""
    config = config.resolve(0)
    files = ModelFiles.read(config)
    return EngineCore(config, files, ModelRunner(config, files, ParallelState(rank, **config.placement())))


def _rank(rank: int, tp: int, directory: str, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", tp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=LIMIT)
    torch.save(function(rank, *arguments), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def run_ranks(tp: int, directory: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(rank, *arguments) on each of `tp` ranks; what each returned (plain data), in rank order."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ranks = [context.Process(target=_rank, args=(r, tp, str(directory), function, arguments)) for r in range(tp)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(2 * LIMIT.total_seconds())
            assert process.exitcode == 0, f"a rank of {tp} ended with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(tp)]
