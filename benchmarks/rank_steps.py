"""Decode steps on real ranks by the machinery of `python -m engine.bench step`, all ranks making the same calls, and
one engine's weights under one dispatcher after another."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from engine.bench.step import decode_step, measure_point
from engine.comm import choice
from engine.comm.choice import DispatcherChoice
from engine.comm.collectives import agree_on_minimum
from engine.comm.dispatcher import DispatchLimits
from engine.decode_batch import bucket_sizes
from engine.graph import CudaRecorder
from engine.model_runner import ModelRunner


def slowest(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Of one row of each rank: the slowest rank's, and what all took."""
    return max(rows, key=lambda row: row["ms"]) | {"ms of ranks": [row["ms"] for row in rows]}


def measured_row(
    runner: ModelRunner, batch: int, context: int, args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """A row of `engine.bench step` and what one such step sends."""
    agree_on_minimum(0, runner.parallel)  # ranks begin together
    row = measure_point(runner, batch, context, args, bandwidth)
    with runner.parallel.meter.apart() as sends:
        runner.execute(decode_step(runner, batch, context)).read()
    return row | {"rounds": sends.rounds, "bytes sent": sends.bytes}


def limits_of(runner: ModelRunner) -> DispatchLimits:
    """What the runner's dispatchers are built for."""
    model = runner.model_config
    return DispatchLimits(
        num_experts=model.n_routed_experts,
        width=model.hidden_size,
        top_k=model.num_experts_per_tok,
        max_tokens=max(runner.config.max_num_batched_tokens, runner.config.max_num_seqs),
        dtype=getattr(torch, runner.config.dtype),
    )


@torch.inference_mode()
def exchange_through(runner: ModelRunner, name: str) -> None:
    """The same weights and cache with another dispatcher ("auto" measures anew), which must shard tokens or not as the
    one before. Steps run without graphs until `capture`."""
    limits = limits_of(runner)
    runner.drop_graphs()
    runner.dispatchers.close()
    sizes = choice.measured_sizes(bucket_sizes(runner.max_num_seqs), limits.max_tokens)
    runner.dispatchers = DispatcherChoice(name, runner.parallel, limits, sizes, "off")


def capture(runner: ModelRunner, batches: list[int]) -> None:
    """Graphs of steps of so many requests, where they may be captured."""
    if runner.overlaps and runner.capture_obstacle() is None:
        runner.capture(CudaRecorder(runner.parallel.device), sorted(set(batches)))
