"""How long calls take: by a GPU's own clock, from a CUDA graph or without, and by the host's clock.

Figures of a graph include their share of the gaps between kernels and exclude the launch of the graph.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

WARM_UP = 3

Call = Callable[[], object]


def run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """One graph of all calls, each of which has run before outside it.

    Other threads may call CUDA meanwhile: a process group's watchdog asks after the collectives that ran before.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_all(calls)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run_all(calls)
    return graph


def clocked(calls: Sequence[Call]) -> float:
    """Seconds of all calls by the host's clock."""
    start = time.perf_counter()
    run_all(calls)
    return time.perf_counter() - start


def replayed(run: Call, replays: int) -> list[float]:
    """Seconds of each run on the present GPU, after a warm-up."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for _ in range(WARM_UP):
        run()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
