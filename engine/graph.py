"""CUDA graphs of whole decode steps, one for each number of rows, in one memory pool with a budget.

A graph reads and writes the same memory in every replay: its inputs are a DecodeBatch, its outputs the logits and the
sampled tokens, all of which live as long as it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.comm.meter import CommMeter
from engine.decode_batch import DecodeBatch
from engine.log import logger

_WARM_UPS = 2


class Graph(Protocol):
    def replay(self) -> None:
        """Computes again what was captured, from what its inputs hold now."""

    def reset(self) -> None:
        """Gives back what the capture holds; there is no replay after that."""


class Recorder(Protocol):
    """How steps are captured and what they take; on a GPU as CUDA graphs."""

    def memory(self) -> int:
        """Bytes in use now, as far as captures change it."""

    def capture(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        """The graph of a call and what the call returned."""

    def drop(self) -> None:
        """Forgets the pool of graphs that are gone."""


class CudaRecorder:
    """All captures share one pool, since no two graphs run at a time.

    Other threads may call CUDA during a capture: a process group's watchdog asks after the collectives before it.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.drop()

    def memory(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # as a capture does, which would else seem to take less than it does
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def capture(self, function: Callable[[], Any]) -> tuple[Graph, Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph, result

    def drop(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()


@dataclass
class DecodeGraph:
    """One bucket. `step` leaves each row's most likely token in the sampled tokens; `draw` replaces those of rows
    that are not greedy. `sends` counts what a step communicates. `num_bytes` is what its capture added on the rank
    where that is most."""

    inputs: DecodeBatch
    step: Graph
    draw: Graph
    logits_NV: torch.Tensor
    kept: tuple
    sends: CommMeter
    num_bytes: int = 0


class GraphRunner:
    """The captured decode steps, largest first so that the others fit into its memory.

    `step(inputs)` computes logits and greedy tokens of a DecodeBatch and returns (logits [N, V], maxima [N]);
    `draw(inputs, logits, maxima)` samples. `meter` is where a step counts what it sends. A bucket that would pass
    `max_bytes` is given up, and smaller ones tried. `agree(value)` is the smallest value of all ranks, none of which
    goes on before all have asked: a graph's collectives are captured and replayed by all ranks or by none, so they
    enter each capture together and keep the same buckets.
    """

    def __init__(
        self,
        recorder: Recorder,
        step: Callable[[DecodeBatch], tuple[torch.Tensor, torch.Tensor]],
        draw: Callable[[DecodeBatch, torch.Tensor, torch.Tensor], None],
        max_bytes: int,
        meter: CommMeter | None = None,
        agree: Callable[[int], int] = int,
    ):
        self._recorder, self._step, self._draw, self._max_bytes = recorder, step, draw, max_bytes
        self._meter, self._agree = meter or CommMeter(), agree
        self._graphs: dict[int, DecodeGraph] = {}
        self._choice: list[DecodeGraph | None] = [None]

    @property
    def captured(self) -> dict[int, DecodeGraph]:
        """By number of rows."""
        return dict(self._graphs)

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self._graphs.values())

    def capture_all(self, batches: list[DecodeBatch]) -> None:
        started = time.monotonic()
        try:
            self._capture_fitting(batches)
        except BaseException:
            self.close()
            raise
        self._choose()
        self._report(time.monotonic() - started)

    def _capture_fitting(self, batches: list[DecodeBatch]) -> None:
        for inputs in sorted(batches, key=lambda b: -b.num_rows):
            graph = self._capture(inputs)
            if self.num_bytes + graph.num_bytes <= self._max_bytes:
                self._graphs[inputs.num_rows] = graph
                continue
            logger.warning(
                "the graph of %d rows takes %.1f MiB, more than is left of graph_memory_gb; such steps run without",
                inputs.num_rows,
                graph.num_bytes / 2**20,
            )
            del graph
            if not self._graphs:
                self._recorder.drop()

    def _capture(self, inputs: DecodeBatch) -> DecodeGraph:
        for _ in range(_WARM_UPS):
            self._draw(inputs, *self._step(inputs))
        before = self._recorder.memory()
        self._agree(0)
        with self._meter.apart() as sends:
            step, (logits_NV, maxima_N) = self._recorder.capture(lambda: self._step(inputs))
        draw, _ = self._recorder.capture(lambda: self._draw(inputs, logits_NV, maxima_N))
        taken = -self._agree(-max(self._recorder.memory() - before, 0))
        return DecodeGraph(inputs, step, draw, logits_NV, (maxima_N,), sends, taken)

    def _choose(self) -> None:
        """The smallest bucket for every number of requests up to the largest."""
        sizes = sorted(self._graphs)
        most = sizes[-1] if sizes else 0
        self._choice = [None, *(self._graphs[next(s for s in sizes if s >= n)] for n in range(1, most + 1))]

    def _report(self, seconds: float) -> None:
        each = ", ".join(f"{size}: {graph.num_bytes / 2**20:.1f}" for size, graph in sorted(self._graphs.items()))
        logger.info(
            "%d decode graphs in %.1f s take %.1f MiB (rows: MiB added; %s)",
            len(self._graphs),
            seconds,
            self.num_bytes / 2**20,
            each or "none",
        )

    def close(self) -> None:
        """Ends the graphs, whoever still holds them: a process group ends only when no graph holds its collectives."""
        for graph in self._graphs.values():
            graph.step.reset()
            graph.draw.reset()
        self._graphs.clear()
        self._choice = [None]

    def choose(self, num_requests: int) -> DecodeGraph | None:
        """The graph for a step of so many decodes; None where none is large enough."""
        return self._choice[num_requests] if num_requests < len(self._choice) else None


def capture_obstacle(parts: dict[str, Any]) -> str | None:
    """Which part of a step cannot be captured, since it reads lengths or counts on the host; None if all can.

    A part says so by its attribute `is_capturable`; one without it cannot."""
    return next((name for name, part in parts.items() if not getattr(part, "is_capturable", False)), None)
