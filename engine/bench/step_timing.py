"""Times decode steps as serving runs them: host and device overlapped, the device alone, the host alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.bench.gpu_timing import WARM_UP, Timing, summary, synchronize, time_graph
from engine.graph import CudaRecorder, DecodeGraph
from engine.model_runner import ModelRunner
from engine.scheduler import SchedulerOutput


@contextmanager
def captured(runner: ModelRunner, num_requests: int) -> Iterator[None]:
    """Within it decodes of `num_requests` replay graphs captured now, with what stands in for parts of the model."""
    before = runner.graphs
    if before is not None:
        runner.capture(CudaRecorder(runner.parallel.device), [num_requests])
    try:
        yield
    finally:
        runner.graphs = before


@contextmanager
def without_graphs(runner: ModelRunner) -> Iterator[None]:
    before = runner.graphs, runner.segments
    runner.graphs = runner.segments = None
    try:
        yield
    finally:
        runner.graphs, runner.segments = before


def time_steady(runner: ModelRunner, output: SchedulerOutput, replays: int) -> tuple[Timing, float]:
    """A step in a row of its like, tokens read one step behind as the engine does -> (timing, host seconds a step).

    Host seconds are those in which the host plans no wait: filling the inputs and launching."""
    synchronize(runner.parallel.device)
    in_flight, marks, launches = runner.execute(output), [], []
    for _ in range(WARM_UP + replays + 1):
        start = time.perf_counter()
        launched = runner.execute(output)
        launches.append(time.perf_counter() - start)
        in_flight.read()
        in_flight = launched
        marks.append(time.perf_counter())
    in_flight.read()
    samples = [b - a for a, b in zip(marks[WARM_UP:], marks[WARM_UP + 1 :], strict=False)]
    return summary(samples, 1, "steady"), statistics.median(launches[WARM_UP:])


def graph_of(runner: ModelRunner, output: SchedulerOutput) -> DecodeGraph | None:
    """The graph that `execute` replays for the step, its inputs those of the step; None where it has none."""
    graph = None if runner.graphs is None else runner.graphs.choose(len(output.scheduled), output.plan)
    if graph is not None:
        runner.execute(output).read()
    return graph


def time_device(graph: DecodeGraph, replays: int) -> Timing:
    """Replays back to back, by the device's clock."""
    return time_graph(graph.whole.replay, replays)


@dataclass(frozen=True)
class Kernels:
    """Of one replay: kernels, and the share of the time from the first to the last in which at least one ran."""

    count: int
    busy: float


def profile(graph: DecodeGraph) -> Kernels:
    graph.whole.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.whole.replay()
        torch.cuda.synchronize()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return Kernels(len(spans), busy_fraction(spans))


def busy_fraction(spans: list[tuple[float, float]]) -> float:
    """Covered share of the time from the first start to the last end; spans may overlap."""
    if not spans:
        return 0.0
    covered, until = 0.0, min(start for start, _ in spans)
    first = until
    for start, end in sorted(spans):
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered / (until - first) if until > first else 0.0
