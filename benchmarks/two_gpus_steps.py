"""Decode steps of a large cut of the model on real ranks: the machinery of `python -m engine.bench step`, every rank
making the same calls. Context is pretended: the cache holds random numbers."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.rank_steps import capture, exchange_through, measured_row, slowest
from benchmarks.rank_team import RankTeam
from benchmarks.silent_steps import SILENT, rounds_ms, silence
from engine.bench import share
from engine.bench.gpu_timing import read_bandwidth
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig


class StepRank:
    """One rank's engine with made-up weights, whose steps go through one dispatcher after another.

    moe_comm: what it is built with; those that follow shard tokens as this does or do not, since the shared expert's
    weights depend on it. points: "batch@context" pairs."""

    def __init__(
        self,
        parallel: ParallelState,
        model: str,
        overrides: dict[str, int],
        moe_comm: str,
        points: str,
        replays: int,
    ):
        self._points = share.parse_points(points, "points")
        self._batches = [batch for batch, _ in self._points]
        config = EngineConfig(
            model=model, tp=parallel.tp, ep=parallel.ep, device=parallel.device.type, load_format="dummy",
            moe_comm=moe_comm, hf_overrides=overrides, max_num_batched_tokens=max(self._batches),
        ).resolve(torch.cuda.device_count())  # fmt: skip
        needs = max(batch * share.blocks_of(context) for batch, context in self._points)
        longest = max(context for _, context in self._points)
        self._runner, self._through = share.build_runner(config, needs, longest, max(self._batches), parallel), moe_comm
        self._bandwidth = read_bandwidth(parallel.device)
        self._args = argparse.Namespace(
            replays=replays, routing="model", eager=False, ep_share=parallel.ep, seed=config.seed
        )

    def rows(self, dispatcher: str) -> list[dict[str, Any]]:
        """Rows of `engine.bench step`, with the dispatcher that was used, what a step sends, and what its rounds take
        by themselves. Of ranks that replicate tokens "auto" and "silent" may be asked for too."""
        runner, silent = self._runner, dispatcher == SILENT
        if silent:
            silence(runner)
        elif dispatcher != self._through:
            exchange_through(runner, dispatcher)
        self._through = dispatcher
        alone = [
            {"dispatcher": runner.dispatchers.for_rows(batch).name, "rounds ms": rounds_ms(runner, batch, silent)}
            for batch in self._batches
        ]
        if runner.graphs is None:
            capture(runner, self._batches)
        rows = [measured_row(runner, *point, self._args, self._bandwidth) for point in self._points]
        return [row | one for row, one in zip(rows, alone, strict=True)]

    def close(self) -> None:
        self._runner.close()


def team(settings: dict[str, Any], tp: int, ep: int, device: str) -> RankTeam:
    """settings: those of StepRank."""
    return RankTeam("benchmarks.two_gpus_steps:StepRank", settings, tp, ep, device)


def measure(ranks: RankTeam, dispatcher: str, seconds: float) -> list[dict[str, Any]]:
    """The slowest rank's row at each point, and what all ranks took. Raises RuntimeError as the team does."""
    return [slowest(rows) for rows in zip(*ranks.call("rows", {"dispatcher": dispatcher}, seconds), strict=True)]
