"""Decode steps of a large cut of the model on real ranks: the machinery of `python -m engine.bench step`, every rank
making the same calls. Context is pretended: the cache holds random numbers."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.rank_steps import capture, exchange_through, measured_row, slowest
from benchmarks.ranks import on_ranks
from engine.bench import share
from engine.bench.gpu_timing import read_bandwidth
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig


def measure(tp: int, ep: int, device: str, seconds: float, settings: dict[str, Any]) -> dict[str, list[dict]]:
    """Dispatcher -> its rows, the slowest rank's time in each. settings: those of `rows_of_rank`."""
    ranks = on_ranks("benchmarks.two_gpus_steps:rows_of_rank", settings, tp, ep, device, seconds)
    return {name: [slowest(rows) for rows in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


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
            exchange_through(runner, name)
            capture(runner, [batch for batch, _ in steps])
        rows[name] = [measured_row(runner, *step, args, bandwidth) for step in steps]
    return rows
