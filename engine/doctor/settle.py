"""What a machine is to be asked before it is trusted: which NCCL settings survive capture, and symmetric memory.

Each runs with ranks of its own, since settings count from a process's start and a wrong one may hang or kill it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from engine.comm.collectives import together
from engine.comm.parallel_state import ParallelState
from engine.doctor.team import Outcome, World

ALGORITHMS = ("Ring", "Tree")
PROTOCOLS = ("LL", "LL128", "Simple")
PROBE_SECONDS, START_SECONDS = 10.0, 20.0
FEW_ROWS, BETTER = 8, 0.85
PUSH_BYTES = 8 * 2**20
LIBRARIES = {
    "mscclpp": (
        "MSCCL++",
        "its all-reduce for one host is worth a trial where NCCL is slow for small messages; it is built from source",
    ),
    "flashinfer": (
        "FlashInfer",
        "its fused and its PCIe all-reduce need pip install flashinfer-python, and Turnout does not call them",
    ),
}


def settling_worlds() -> list[World]:
    """Symmetric memory, then NCCL's algorithms and protocols, each in a world of its own."""
    # Multicast needs a switch that few hosts have, and rendezvous may wait for it for ever.
    symmetric = _world("symmetric memory", {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
    nccl = [
        _world("collective:all-reduce", {"NCCL_ALGO": algorithm, "NCCL_PROTO": protocol})
        for algorithm in ALGORITHMS
        for protocol in PROTOCOLS
    ]
    return [symmetric, *nccl]


def _world(probe: str, environment: dict[str, str]) -> World:
    """The first all-reduce takes the time of starting, so that the probe itself has a short limit."""
    return World(("first all-reduce", probe), environment, PROBE_SECONDS, START_SECONDS)


def symmetric_memory(
    parallel: ParallelState, rows: tuple[int, ...], width: int, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, Any]:
    """torch's one-shot and two-shot all-reduce, and pushes to all peers by one rank alone and by all at once.

    `seconds` times a call on the slowest rank. Raises RankError with the reason where it does not work.
    """
    import torch.distributed._symmetric_memory as symmetric

    group, shared = dist.group.WORLD.group_name, []

    def allocate() -> None:
        buffer = symmetric.empty(max(rows) * width, dtype=torch.bfloat16, device=parallel.device).zero_()
        shared.append((buffer, symmetric.rendezvous(buffer, group)))

    together(allocate, parallel)
    buffer, handle = shared[0]
    one_shot, two_shot = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
    return {
        "one-shot": {t: seconds(lambda t=t: one_shot(buffer[: t * width], "sum", group)) for t in rows},
        "two-shot": {t: seconds(lambda t=t: two_shot(buffer[: t * width], "sum", group)) for t in rows},
        "pushes": _pushes(parallel, handle, buffer.numel(), seconds),
    }


def _pushes(
    parallel: ParallelState, handle: Any, numel: int, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Bytes per second out of one rank to all its peers: the first rank alone, and every rank at once."""
    numel = min(numel, PUSH_BYTES // 2)
    own = torch.zeros(numel, dtype=torch.bfloat16, device=parallel.device)
    others = [rank for rank in range(parallel.tp) if rank != parallel.rank]
    peers = [handle.get_buffer(rank, (numel,), torch.bfloat16) for rank in others]

    def push() -> None:
        for peer in peers:
            peer.copy_(own)

    alone = push if parallel.rank == 0 else lambda: own.zero_()
    sent = own.nbytes * len(peers)
    return {"alone": sent / seconds(alone), "all at once": sent / seconds(push)}


def settled_rows(outcomes: Mapping[str, Outcome], rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """A table: what was tried, microseconds by rows, or why not. Nothing where nothing was tried."""
    table = []
    for key, outcome in outcomes.items():
        if key.startswith("NCCL_ALGO") and key.endswith("collective:all-reduce"):
            label = key.partition(":")[0].replace("NCCL_ALGO=", "NCCL ").replace("NCCL_PROTO=", "")
            table.append(_settled(label, outcome, outcome.value, rows))
        elif key.endswith("symmetric memory"):
            for name in ("one-shot", "two-shot"):
                value = outcome.value and outcome.value[name]
                table.append(_settled(f"torch symmetric memory, {name}", outcome, value, rows))
    return table


def _settled(label: str, outcome: Outcome, value: Mapping | None, rows: tuple[int, ...]) -> dict[str, Any]:
    us = {f"T={t}": None if value is None else float(value[str(t)]) * 1e6 for t in rows}
    failed = outcome.failed and outcome.failed.removeprefix("not tried: ")  # the group itself could not be made
    if failed and "NCCL error" in failed:
        failed = f"NCCL refuses it here ({failed.partition(', NCCL version')[0].rpartition(', ')[2]})"
    return {"all-reduce in a graph": label, **us, "what happened": failed or "survives capture"}


def better_setting(
    outcomes: Mapping[str, Outcome], rows: tuple[int, ...], default_seconds: Mapping[int, float]
) -> str | None:
    """A setting that makes steps of few rows faster than NCCL's own choice does, in a sentence; None without one.

    Held against the sum over the sizes of decode and verify steps, which one setting has to serve alike.
    """
    few = [t for t in rows if t <= FEW_ROWS and t in default_seconds]
    usual = sum(default_seconds[t] for t in few) * 1e6
    tried = {
        row["all-reduce in a graph"]: sum(row[f"T={t}"] for t in few)
        for row in settled_rows(outcomes, rows)
        if row["all-reduce in a graph"].startswith("NCCL") and all(row[f"T={t}"] is not None for t in few)
    }
    if not few or not tried:
        return None
    best = min(tried, key=tried.get)
    if tried[best] > BETTER * usual:
        return None
    _, algorithm, protocol = best.split()
    return (
        f"Set NCCL_ALGO={algorithm} NCCL_PROTO={protocol}: all-reduces of up to {few[-1]} rows take "
        f"{tried[best] / usual:.2f} of the time that they take by NCCL's own choice."
    )


def sentences(outcomes: Mapping[str, Outcome], rows: tuple[int, ...]) -> list[str]:
    """Which setting is fastest at each size, what did not survive, and whether pushes get in each other's way."""
    table = settled_rows(outcomes, rows)
    said = []
    nccl = [row for row in table if row["all-reduce in a graph"].startswith("NCCL")]
    for low, high, name in _runs(nccl, rows):
        said.append(f"Of NCCL's settings {name} is fastest at {_span(low, high)}.")
    lost = [row["all-reduce in a graph"] for row in table if row["what happened"] != "survives capture"]
    if lost:
        said.append(f"Do not use here: {', '.join(lost)}.")
    said += _contention(outcomes)
    return said + [_library(module, *about) for module, about in LIBRARIES.items()]


def _runs(table: list[dict[str, Any]], rows: tuple[int, ...]) -> list[tuple[int, int, str]]:
    """(first rows, last rows, fastest setting) of neighbouring sizes with the same winner."""
    runs: list[tuple[int, int, str]] = []
    for t in rows:
        known = {row["all-reduce in a graph"]: row[f"T={t}"] for row in table if row[f"T={t}"] is not None}
        if not known:
            continue
        winner = min(known, key=known.get)
        if runs and runs[-1][2] == winner:
            runs[-1] = (runs[-1][0], t, winner)
        else:
            runs.append((t, t, winner))
    return runs


def _contention(outcomes: Mapping[str, Outcome]) -> list[str]:
    value = next((o.value for key, o in outcomes.items() if key.endswith("symmetric memory") and o.value), None)
    if value is None:
        return []
    alone, together_ = (value["pushes"][name] / 1e9 for name in ("alone", "all at once"))
    text = f"A rank pushes to its peers at {alone:.3g} GB/s alone and {together_:.3g} GB/s when all push at once"
    if together_ < alone / 2:
        return [f"{text}: the paths are shared, so one-shot exchanges contend; prefer symm_scatter or allreduce."]
    return [f"{text}: pushes do not get in each other's way."]


def _library(module: str, name: str, hint: str) -> str:
    if importlib.util.find_spec(module) is None:
        return f"{name} is not installed; {hint}."
    return f"{name} is installed; Turnout does not measure it: compare its own benchmark with the table above."


def _span(low: int, high: int) -> str:
    return f"T={low}" if low == high else f"T={low} to {high}"
