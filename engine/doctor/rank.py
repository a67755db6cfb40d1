"""`python -m engine.doctor.rank`: one rank that the doctor starts, measures with, and ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from engine.comm.collectives import RankError
from engine.comm.parallel_state import ParallelState
from engine.doctor.keys import AT, FAILED, GO, RESULT, SETTINGS, world_store
from engine.doctor.probes import Bench, run_probe
from engine.doctor.settings import Settings
from engine.doctor.simulate import Delay


def main() -> int:
    threading.Thread(target=_end_with_doctor, name="doctor-pipe", daemon=True).start()
    args = _arguments()
    store = world_store(args.store, args.world)
    try:
        settings = Settings.from_json(store.get(SETTINGS).decode())
        device = _device(settings, args.local_rank)
        store.set(AT.format(args.rank), "-1")
        store.wait([GO], timedelta(seconds=settings.seconds))
        _measure(args, settings, device, store)
    except Exception as error:
        store.set(FAILED.format(args.rank), f"{type(error).__name__}: {_first_line(error)}")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of the doctor's, started by it.")
    for name in ("rank", "local-rank", "world"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--store", required=True, metavar="HOST:PORT")
    parser.add_argument("--probes", required=True, help="JSON list")
    return parser.parse_args()


def _end_with_doctor() -> None:
    """The pipe at stdin closes when the doctor ends, however it ends."""
    while os.read(0, 1024):
        pass
    os._exit(1)


def _device(settings: Settings, local_rank: int) -> torch.device:
    """Its context is made here, before the other ranks wait for this one."""
    if settings.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.tp))
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    return device


@torch.inference_mode()
def _measure(args: argparse.Namespace, settings: Settings, device: torch.device, store: dist.Store) -> None:
    parallel = _parallel_state(args.rank, settings, device, store)
    link = settings.link()
    bench = Bench(parallel, settings.limits(), settings.rows, link, Delay(device) if link else None)
    for number, name in enumerate(json.loads(args.probes)):
        store.set(AT.format(args.rank), str(number))
        try:
            outcome = {"value": run_probe(bench, name)}
        except RankError as error:
            outcome = {"failed": _first_line(error)}
        if args.rank == 0:
            store.set(RESULT.format(number), json.dumps(outcome))


def _parallel_state(rank: int, settings: Settings, device: torch.device, store: dist.Store) -> ParallelState:
    if settings.tp > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=settings.tp,
            timeout=timedelta(seconds=settings.seconds),
            device_id=device if device.type == "cuda" else None,
        )
    return ParallelState(rank, settings.tp, settings.ep, device)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no reason given").splitlines()[0]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # nothing is left to be torn down in order, and a broken collective would hold it up
