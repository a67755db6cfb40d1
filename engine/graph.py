"""CUDA graphs of whole decode steps, one for each number of requests and guesses, in one memory pool with a budget.

A graph reads and writes the same memory in every replay: its inputs are a DecodeBatch, its outputs the state that the
next step starts from, all of which live as long as it does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.comm.meter import CommMeter
from engine.decode_batch import DecodeBatch
from engine.decode_step import DecodeStep, Variant
from engine.log import logger
from engine.scheduler import NO_GUESSES, GuessPlan

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
    """One variant. `whole` is the step in one piece; `forward` and `finish` are the same step cut where the logits are,
    for steps in which the host changes them or reads them. `sends` counts what a step communicates. `num_bytes` is what
    its captures added on the rank where that is most."""

    variant: Variant
    inputs: DecodeBatch
    whole: Graph
    forward: Graph
    finish: Graph
    kept: tuple
    sends: CommMeter
    num_bytes: int = 0

    @property
    def logits_MV(self) -> torch.Tensor:
        """Where `forward` leaves them and `finish` takes them."""
        return self.kept[0].logits_MV

    def reset(self) -> None:
        for graph in (self.whole, self.forward, self.finish):
            graph.reset()


class GraphRunner:
    """The captured decode steps, largest first so that the others fit into its memory.

    `meter` is where a step counts what it sends. A variant that would pass `max_bytes` is given up, and smaller ones
    tried. `agree(value)` is the smallest value of all ranks, none of which goes on before all have asked: a graph's
    collectives are captured and replayed by all ranks or by none, so they enter each capture together and keep the same
    variants.
    """

    def __init__(
        self,
        recorder: Recorder,
        step: DecodeStep,
        max_bytes: int,
        meter: CommMeter | None = None,
        agree: Callable[[int], int] = int,
    ):
        self._recorder, self._step, self._max_bytes = recorder, step, max_bytes
        self._meter, self._agree = meter or CommMeter(), agree
        self._graphs: dict[Variant, DecodeGraph] = {}
        self._sizes: list[int] = []

    @property
    def captured(self) -> dict[Variant, DecodeGraph]:
        return dict(self._graphs)

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self._graphs.values())

    def capture_all(self, wanted: list[tuple[Variant, DecodeBatch]]) -> None:
        """Each with the inputs of its size, which variants of one size may share."""
        started = time.monotonic()
        try:
            self._capture_fitting(wanted)
        except BaseException:
            self.close()
            raise
        self._sizes = sorted({variant.num_requests for variant in self._graphs if variant == (variant[0], 0, 0)})
        self._report(time.monotonic() - started)

    def _capture_fitting(self, wanted: list[tuple[Variant, DecodeBatch]]) -> None:
        for variant, inputs in sorted(wanted, key=lambda pair: (-pair[0].num_rows, -pair[0].num_requests, pair[0])):
            graph = self._capture(variant, inputs)
            if self.num_bytes + graph.num_bytes <= self._max_bytes:
                self._graphs[variant] = graph
                continue
            logger.warning(
                "the graph of %d rows takes %.1f MiB, more than is left of graph_memory_gb; such steps run without",
                variant.num_rows,
                graph.num_bytes / 2**20,
            )
            graph.reset()
            if not self._graphs:
                self._recorder.drop()

    def _capture(self, variant: Variant, inputs: DecodeBatch) -> DecodeGraph:
        for _ in range(_WARM_UPS):
            self._step.whole(inputs, variant)
        before = self._recorder.memory()
        self._agree(0)
        with self._meter.apart() as sends:
            whole, _ = self._recorder.capture(lambda: self._step.whole(inputs, variant))
        with self._meter.apart():
            forward, kept = self._recorder.capture(lambda: self._step.forward(inputs, variant))
            finish, _ = self._recorder.capture(lambda: self._step.finish(variant, kept))
        taken = -self._agree(-max(self._recorder.memory() - before, 0))
        return DecodeGraph(variant, inputs, whole, forward, finish, kept, sends, taken)

    def _report(self, seconds: float) -> None:
        each = ", ".join(f"{v.num_rows}: {graph.num_bytes / 2**20:.1f}" for v, graph in sorted(self._graphs.items()))
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
            graph.reset()
        self._graphs.clear()
        self._sizes = []

    def choose(self, num_requests: int, plan: GuessPlan = NO_GUESSES) -> DecodeGraph | None:
        """The graph for a step of so many decodes that does what is planned, or as much of it as one does; None where
        none is large enough."""
        size = next((size for size in self._sizes if size >= num_requests > 0), None)
        if size is None:
            return None
        plans = [plan, *(GuessPlan(k, k) for k in range(plan.num_verify - 1, -1, -1)), NO_GUESSES]
        return next(self._graphs[Variant(size, *one)] for one in plans if Variant(size, *one) in self._graphs)

    def num_verify(self, num_requests: int) -> list[int]:
        """The numbers of guesses that steps of so many requests can verify in a graph; none without the step that makes
        the first guesses."""
        size = next((size for size in self._sizes if size >= num_requests > 0), None)
        if size is not None and not any(v.num_requests == size and v.num_propose > v.num_verify for v in self._graphs):
            return [0]
        return sorted({v.num_verify for v in self._graphs if v.num_requests == size and v.num_verify == v.num_propose})


def capture_obstacle(parts: dict[str, Any]) -> str | None:
    """Which part of a step cannot be captured, since it reads lengths or counts on the host; None if all can.

    A part says so by its attribute `is_capturable`; one without it cannot."""
    return next((name for name, part in parts.items() if not getattr(part, "is_capturable", False)), None)
