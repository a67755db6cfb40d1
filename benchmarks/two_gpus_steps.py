"""Decode steps of a large cut of the model on real ranks: the machinery of `python -m engine.bench step`, every rank
making the same calls. Context is pretended: the cache holds random numbers."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.ranks import on_ranks
from engine.bench import share
from engine.bench.gpu_timing import read_bandwidth
from engine.bench.step import decode_step, measure_point
from engine.comm.choice import DispatcherChoice
from engine.comm.collectives import agree_on_minimum
from engine.comm.dispatcher import DispatchLimits
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.graph import CudaRecorder
from engine.model_runner import ModelRunner


def measure(tp: int, ep: int, device: str, seconds: float, settings: dict[str, Any]) -> dict[str, list[dict]]:
    """Dispatcher -> its rows, the slowest rank's time in each. settings: those of `rows_of_rank`."""
    ranks = on_ranks("benchmarks.two_gpus_steps:rows_of_rank", settings, tp, ep, device, seconds)
    return {name: [_slowest(rows) for rows in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def _slowest(rows: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return max(rows, key=lambda row: row["ms"]) | {"ms of ranks": [row["ms"] for row in rows]}


def rows_of_rank(
    parallel: ParallelState, model: str, overrides: dict[str, int], dispatchers: list[str], points: str, replays: int
) -> dict[str, list[dict[str, Any]]]:
    """dispatchers: of one kind, all with sharded tokens or all without, since they use the same weights."""
    steps = share.parse_points(points, "points")
    config = EngineConfig(
        model=model,
        tp=parallel.tp,
        ep=parallel.ep,
        device=parallel.device.type,
        load_format="dummy",
        moe_comm=dispatchers[0],
        hf_overrides=overrides,
        max_num_batched_tokens=max(batch for batch, _ in steps),
    ).resolve(torch.cuda.device_count())
    needs = max(batch * share.blocks_of(context) for batch, context in steps)
    longest, most = max(context for _, context in steps), max(batch for batch, _ in steps)
    runner = share.build_runner(config, needs, longest, most, parallel)
    bandwidth = read_bandwidth(parallel.device)
    args = argparse.Namespace(replays=replays, routing="model", eager=False, ep_share=parallel.ep, seed=config.seed)
    rows = {}
    for name in dispatchers:
        if name != dispatchers[0]:
            _exchange_through(runner, name, [batch for batch, _ in steps])
        rows[name] = [_row(runner, *step, args, bandwidth) for step in steps]
    return rows


def _row(runner: ModelRunner, batch: int, context: int, args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """A row of `engine.bench step` and what one such step sends."""
    agree_on_minimum(0, runner.parallel)  # ranks begin together
    row = measure_point(runner, batch, context, args, bandwidth)
    with runner.parallel.meter.apart() as sends:
        runner.execute(decode_step(runner, batch, context)).read()
    return row | {"rounds": sends.rounds, "bytes sent": sends.bytes}


@torch.inference_mode()
def _exchange_through(runner: ModelRunner, name: str, batches: list[int]) -> None:
    """The same weights and cache with another dispatcher, and graphs of these batches that hold it."""
    model = runner.model_config
    limits = DispatchLimits(
        num_experts=model.n_routed_experts,
        width=model.hidden_size,
        top_k=model.num_experts_per_tok,
        max_tokens=max(runner.config.max_num_batched_tokens, runner.config.max_num_seqs),
        dtype=getattr(torch, runner.config.dtype),
    )
    runner.drop_graphs()
    runner.dispatchers.close()
    runner.dispatchers = DispatcherChoice(name, runner.parallel, limits)
    if runner.overlaps and runner.capture_obstacle() is None:
        runner.capture(CudaRecorder(runner.parallel.device), sorted(set(batches)))
