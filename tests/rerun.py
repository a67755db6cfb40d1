"""Decode steps "captured" without a GPU: a replay calls the step again on the buffers that it was captured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from engine import segments
from engine.attention.reference import ReferenceAttention
from engine.model_runner import ModelRunner


class _Rerun:
    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self.num_replays = 0
        self.outputs = function()

    def replay(self) -> None:
        """New results go where the captured ones lie, as in a graph."""
        self.num_replays += 1
        for old, new in zip(_tensors(self.outputs), _tensors(self._function()), strict=True):
            old.copy_(new)

    def reset(self) -> None:
        self._function = None


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    """All of them, however deep in tuples and dataclasses."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors(part)
    elif is_dataclass(result):
        for field in fields(result):
            yield from _tensors(getattr(result, field.name))


class RerunRecorder:
    """`sizes` gives what each capture claims to take, in bytes, in order; 0 after the last."""

    def __init__(self, sizes: list[int] = ()):
        self._sizes, self._used = list(sizes), 0
        self.graphs: list[_Rerun] = []

    def memory(self) -> int:
        return self._used

    def capture(self, function: Callable[[], Any]) -> tuple[_Rerun, Any]:
        self.graphs.append(_Rerun(function))
        self._used += self._sizes.pop(0) if self._sizes else 0
        return self.graphs[-1], self.graphs[-1].outputs

    def drop(self) -> None:
        self._used = 0


class DeviceLengths(ReferenceAttention):
    """Takes lengths from the batch's tensors, as kernels do; a step without host lists shows that none is needed."""

    is_capturable = True

    def attend(self, q, cache, batch, *args):
        starts = batch.query_starts_N1
        lengths = {"query_lens": (starts[1:] - starts[:-1]).tolist(), "seq_lens": batch.seq_lens_N.tolist()}
        return super().attend(q, cache, replace(batch, **lengths), *args)


def record(runner: ModelRunner) -> RerunRecorder:
    """Makes the runner replay its decode steps."""
    runner.model.backend = DeviceLengths()
    recorder = RerunRecorder()
    runner.capture(recorder)
    return recorder


def record_segments(runner: ModelRunner, sizes: list[int], taken: list[int] = ()) -> RerunRecorder:
    """Makes the runner replay what lies between attentions of its other steps, of up to these numbers of rows; `taken`
    as RerunRecorder has it."""
    recorder = RerunRecorder(taken)
    runner.segments = segments.capture(runner, recorder, sizes)
    return recorder
