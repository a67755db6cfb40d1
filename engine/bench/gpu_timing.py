"""Times calls on a device: CUDA-graph replay on a GPU, the clock on a CPU; and the rates that results are held against.

Figures of a graph include their share of the gaps between kernels and exclude the launch of the graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.timing import WARM_UP, Call, capture, clocked, replayed, run_all, synchronize

READ_BYTES = {"cuda": 4 * 10**9, "cpu": 64 * 10**6}
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over the replays; `mode` is graph, eager, cpu, host or steady."""

    median: float
    p10: float
    p90: float
    mode: str

    @property
    def spread(self) -> float:
        return (self.p90 - self.p10) / self.median


def time_calls(calls: Sequence[Call], device: torch.device, replays: int = 30, use_graph: bool = True) -> Timing:
    """Runs all `calls` one after another, `replays` times after a warm-up; they must keep their inputs alive.

    Different inputs in every call keep caches from helping. With `use_graph` a GPU replays them from one CUDA graph, in
    which a call may not wait for the device.
    """
    if device.type != "cuda":
        return summary([clocked(calls) for _ in range(WARM_UP + replays)][WARM_UP:], len(calls), "cpu")
    if not use_graph:
        return summary(replayed(lambda: run_all(calls), replays), len(calls), "eager")
    graph = capture(calls)
    return summary(replayed(graph.replay, replays), len(calls), "graph")


def time_graph(replay: Call, replays: int) -> Timing:
    """A graph's replays one after another, by the device's clock."""
    return summary(replayed(replay, replays), 1, "graph")


def time_host(call: Call, device: torch.device, replays: int = 30) -> Timing:
    """Times a call that the host takes part in, until the device has finished it."""
    samples = []
    for _ in range(WARM_UP + replays):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        samples.append(time.perf_counter() - start)
    return summary(samples[WARM_UP:], 1, "host")


def read_bandwidth(device: torch.device, rounds: int = 5) -> float:
    """Bytes per second of the best one-pass read of a buffer far larger than any cache."""
    num_bytes = READ_BYTES[device.type]
    if device.type != "cuda":
        x = torch.ones(num_bytes // 4)
        return x.nbytes / min(clocked([x.sum]) for _ in range(rounds))
    from engine.kernels.gpu.stream_read import ROUND, WAYS, stream_read

    x = torch.randn(-(-num_bytes // 4 // ROUND) * ROUND, device=device)
    return x.nbytes / min(min(replayed(lambda way=way: stream_read(x, way), rounds)) for way in WAYS)


def matmul_peak(device: torch.device, dtype: torch.dtype, rounds: int = 10) -> float:
    """FLOP per second of the best large square product of random numbers."""
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = (
        replayed(lambda: a @ b, rounds) if device.type == "cuda" else [clocked([lambda: a @ b]) for _ in range(rounds)]
    )
    return 2 * size**3 / min(seconds)


def summary(samples: list[float], num_calls: int, mode: str) -> Timing:
    """Of samples that took `num_calls` calls each."""
    each = sorted(sample / num_calls for sample in samples)
    return Timing(statistics.median(each), each[len(each) // 10], each[len(each) * 9 // 10], mode)
