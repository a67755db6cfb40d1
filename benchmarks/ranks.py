"""Runs a function on several processes joined by NCCL or gloo: `on_ranks`, and the side of it that each rank is.

Started by itself a rank is `python -m benchmarks.ranks MODULE:FUNCTION ...`; it calls `function(parallel, **settings)`
and leaves what that returns as JSON.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine import log
from engine.comm.parallel_state import ParallelState

ROOT = Path(__file__).resolve().parent.parent
_COLLECTIVE_TIMEOUT = timedelta(minutes=3)
_TAIL = 2000  # characters of a failed rank's output


def on_ranks(work: str, settings: dict[str, Any], tp: int, ep: int, device: str, seconds: float) -> list[Any]:
    """What `work` ("module:function") returned on each of `tp` ranks, in rank order.

    Raises RuntimeError with the end of a rank's output where one fails, or with all ranks' where they take longer."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks = [start(directory, work, settings, rank, tp, ep, device) for rank in range(tp)]
        try:
            _wait(ranks, directory, work, time.monotonic() + seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(tp)]


def environment() -> dict[str, str]:
    """Of a process that imports the engine from this tree."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}


def start(
    directory: Path,
    work: str,
    settings: dict[str, Any],
    rank: int,
    tp: int,
    ep: int,
    device: str,
    stdin: int | None = None,
) -> subprocess.Popen:
    """One rank of `work`, whose output goes to directory/RANK.log. stdin: as Popen takes it."""
    command = [sys.executable, "-m", "benchmarks.ranks", work, "--directory", str(directory), "--rank", str(rank)]
    command += ["--tp", str(tp), "--ep", str(ep), "--device", device, "--settings", json.dumps(settings)]
    with open(directory / f"{rank}.log", "wb") as output:
        streams = {"stdin": stdin, "stdout": output, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=ROOT, env=environment(), **streams)


def _wait(ranks: list[subprocess.Popen], directory: Path, work: str, deadline: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll()]
        if failed:
            raise RuntimeError(f"{work}: rank {failed[0]} failed:\n{tail(directory, failed[0])}")
        if time.monotonic() > deadline:
            tails = "\n".join(tail(directory, number) for number in range(len(ranks)))
            raise RuntimeError(f"{work}: not done in time:\n{tails}")
        time.sleep(0.05)
    failed = [number for number, rank in enumerate(ranks) if rank.poll()]
    if failed:
        raise RuntimeError(f"{work}: rank {failed[0]} failed:\n{tail(directory, failed[0])}")


def tail(directory: Path, rank: int) -> str:
    """The end of what a rank said."""
    return (directory / f"{rank}.log").read_text(errors="replace")[-_TAIL:]


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a measurement.")
    parser.add_argument("work", metavar="MODULE:FUNCTION")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--ep", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    args = parser.parse_args()
    log.setup("info", args.rank)
    parallel = _join(args)
    module, function = args.work.split(":")
    result = getattr(importlib.import_module(module), function)(parallel, **args.settings)
    (args.directory / f"{args.rank}.json").write_text(json.dumps(result))
    gc.collect()  # graphs that hold the communicator go before it
    dist.destroy_process_group()


def _join(args: argparse.Namespace) -> ParallelState:
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", args.rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        store=dist.FileStore(str(args.directory / "store"), args.tp),
        rank=args.rank,
        world_size=args.tp,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if args.device == "cuda" else None,
    )
    return ParallelState(args.rank, args.tp, args.ep, device)


if __name__ == "__main__":
    main()
