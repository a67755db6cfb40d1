"""CUDA graphs of everything between two attentions, for steps that are no decodes alone.

Such a step launches more kernels than the host can in the time that the device needs for a few hundred rows. Its
attention reads lengths on the host and stays as it is; all else is replayed, for a few numbers of rows, padding behind
the real ones.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.chunk_step import SIZES, ChunkStep, run_pieces
from engine.comm.choice_rule import INVARIANT_ROWS
from engine.comm.collectives import agree_on_minimum
from engine.comm.meter import CommMeter
from engine.graph import Graph, Recorder
from engine.log import logger

_WARM_UPS = 2


@dataclass
class Segments:
    """The graphs of one number of rows, one before each attention and one behind the last. `sends`: what such a step
    communicates. `num_bytes`: what the captures added on the rank where that is most."""

    num_rows: int
    graphs: list[Graph]
    cis: torch.Tensor
    sends: CommMeter
    num_bytes: int = 0

    def reset(self) -> None:
        for graph in self.graphs:
            graph.reset()


class SegmentRunner:
    """The captured steps, largest first so that the others fit into its memory; `meter`, `max_bytes` and `agree` as
    GraphRunner has them."""

    def __init__(
        self,
        recorder: Recorder,
        step: ChunkStep,
        max_bytes: int,
        meter: CommMeter | None = None,
        agree: Callable[[int], int] = int,
    ):
        self._recorder, self._step, self._max_bytes = recorder, step, max_bytes
        self._meter, self._agree = meter or CommMeter(), agree
        self._captured: dict[int, Segments] = {}

    @property
    def captured(self) -> dict[int, Segments]:
        return dict(self._captured)

    @property
    def num_bytes(self) -> int:
        return sum(segments.num_bytes for segments in self._captured.values())

    def capture_all(self, sizes: Sequence[int]) -> None:
        started = time.monotonic()
        try:
            self._capture_fitting(sizes)
        except BaseException:
            self.close()
            raise
        each = ", ".join(f"{size}: {s.num_bytes / 2**20:.1f}" for size, s in sorted(self._captured.items()))
        seconds, mib = time.monotonic() - started, self.num_bytes / 2**20
        logger.info("graphs of chunks in %.1f s take %.1f MiB (rows: MiB added; %s)", seconds, mib, each or "none")

    def _capture_fitting(self, sizes: Sequence[int]) -> None:
        for size in sorted(sizes, reverse=True):
            segments = self._capture(size)
            if self.num_bytes + segments.num_bytes <= self._max_bytes:
                self._captured[size] = segments
                continue
            logger.warning(
                "the graphs of chunks of %d rows take %.1f MiB, more than is left of graph_memory_gb; such steps run "
                "without",
                size,
                segments.num_bytes / 2**20,
            )
            segments.reset()

    def _capture(self, num_rows: int) -> Segments:
        for _ in range(_WARM_UPS):
            run_pieces(self._step, num_rows)
        before = self._recorder.memory()
        self._agree(0)
        graphs: list[Graph] = []

        def record(piece: Callable[[], Any]) -> Any:
            graph, result = self._recorder.capture(piece)
            graphs.append(graph)
            return result

        with self._meter.apart() as sends:
            cis = run_pieces(self._step, num_rows, record)
        taken = -self._agree(-max(self._recorder.memory() - before, 0))
        return Segments(num_rows, graphs, cis, sends, taken)

    def choose(self, num_rows: int) -> Segments | None:
        """The smallest that fits. Steps within the invariant range take none beyond it, where a row's bits are others
        (DESIGN.md, fact 4)."""
        most = INVARIANT_ROWS if num_rows <= INVARIANT_ROWS else max(self._captured, default=0)
        fitting = [size for size in self._captured if num_rows <= size <= most]
        return self._captured[min(fitting)] if fitting else None

    def replay(self, segments: Segments, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A step's final norm and features of its real rows [T, ...], which the next replay overwrites."""
        self._step.fill(batch, segments.num_rows)
        self._meter.add(segments.sends)
        attend = self._step.attention(segments.cis, batch)
        first, *others = segments.graphs
        first.replay()
        for index, graph in enumerate(others):
            attend(index)
            graph.replay()
        return self._step.results(batch.token_ids_T.shape[0])

    def close(self) -> None:
        """As GraphRunner.close."""
        for segments in self._captured.values():
            segments.reset()
        self._captured.clear()


@torch.inference_mode()
def capture(runner: Any, recorder: Recorder, sizes: Sequence[int] = SIZES) -> SegmentRunner:
    """For a model runner, over its caches: steps of `sizes` rows, of those that may occur and whose residual stream
    alone fits what the decode steps' graphs have left of the budget."""
    taken = 0 if runner.graphs is None else runner.graphs.num_bytes
    budget = int(runner.config.graph_memory_gb * 2**30) - taken
    row_bytes = runner.model_config.hidden_size * runner.model.dtype.itemsize
    fitting = [size for size in sizes if size <= runner.config.max_num_batched_tokens and size * row_bytes <= budget]
    agree = functools.partial(agree_on_minimum, parallel=runner.parallel)
    segments = SegmentRunner(recorder, ChunkStep.of(runner, fitting), budget, runner.parallel.meter, agree)
    segments.capture_all(fitting)
    for size, captured in segments.captured.items():
        if seconds := runner.round_seconds(size):
            captured.sends.estimate(seconds)
    return segments
