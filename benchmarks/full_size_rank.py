"""One rank of `benchmarks.full_size`: an engine with made-up weights that is built once and measured many times.

Every method is called on all ranks with the same arguments, and makes the same calls on each.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from benchmarks.rank_steps import capture, exchange_through, limits_of, measured_row
from engine.bench import share
from engine.bench.forced import ForcedRunner
from engine.bench.gpu_timing import matmul_peak, read_bandwidth
from engine.bench.spec_share import decode_rate, measure_costs, without_draft
from engine.bench.step import measure_prefill
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes, time_dispatcher
from engine.config import EngineConfig
from engine.doctor.placement import Placement
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner


def microseconds_a_step(times: RoundTimes, config: Any) -> dict[str, Any]:
    """Of all rounds of a step of the model, by verb and in all; `times` are those of one round of each."""
    counts = dict(zip(("reduce", "dispatch", "combine"), Placement(config, 1, 1).verbs(), strict=True))
    verbs = {verb: 1e6 * count * getattr(times, verb) for verb, count in counts.items()}
    return {"comm us": sum(verbs.values()), "comm us by verb": verbs}


class FullSizeRank:
    """settings: of EngineConfig. most: requests at once, `longest` tokens each, of `context` where they are steps.
    chunk: tokens of the largest step."""

    def __init__(
        self, parallel: ParallelState, settings: dict[str, Any], most: int, context: int, longest: int, chunk: int
    ):
        config = replace(EngineConfig(**settings), max_num_batched_tokens=max(chunk, most))
        self.files = ModelFiles.read(config)
        blocks = max(most * share.blocks_of(context), share.blocks_of(longest))
        kind = ModelRunner if self.files.draft is None else ForcedRunner
        self.runner = share.build_runner(config, blocks, longest, most, parallel, kind)
        self._bandwidth, self._peak = read_bandwidth(parallel.device), None

    def steps(self, dispatcher: str, rows: list[int], context: int, replays: int) -> list[dict[str, Any]]:
        """A row for each size: those of `engine.bench step`, what a step sends, and what its rounds take."""
        exchange_through(self.runner, dispatcher)
        comm = {size: self._communication(size, replays) for size in rows}
        capture(self.runner, rows)
        args = self._arguments(replays)
        return [
            measured_row(self.runner, size, context, args, self._bandwidth) | {"rows": size, **comm[size]}
            for size in rows
        ]

    def prefill(self, num_tokens: int, replays: int) -> dict[str, Any]:
        """A fresh prompt through the dispatcher of the steps before."""
        dtype = getattr(torch, self.runner.config.dtype)
        self._peak = self._peak or matmul_peak(self.runner.parallel.device, dtype)
        return measure_prefill(self.runner, num_tokens, self._arguments(replays), self._peak)

    def costs(self, batch: int, context: int, replays: int) -> list[dict[str, Any]]:
        """Steps without a draft and with each number of guesses, as `engine.bench spec` times them."""
        return measure_costs(self.runner, batch, context, replays)

    def decoding(self, batch: int, context: int, num_tokens: int, accept_length: float | None) -> dict[str, Any]:
        """The engine's rate at a forced accept length, always with all guesses; without the draft where None."""
        if accept_length is None:
            with without_draft(self.runner, batch):
                return decode_rate(self.runner, self.files, batch, context, num_tokens)
        self.runner.forced.set(accept_length)
        return decode_rate(self.runner, self.files, batch, context, num_tokens)

    def close(self) -> None:
        self.runner.close()

    def _communication(self, rows: int, replays: int) -> dict[str, Any]:
        """Microseconds of a step's rounds by themselves, by verb and in all, of the slowest rank."""
        runner = self.runner
        dispatcher = runner.dispatchers.for_rows(rows)
        few = {"calls": 1} if runner.parallel.device.type == "cpu" else {}  # a round takes milliseconds there
        times = time_dispatcher(dispatcher, rows, limits_of(runner), runner.parallel, replays=replays, **few)
        return {"dispatcher": dispatcher.name} | microseconds_a_step(times, runner.model_config)

    def _arguments(self, replays: int) -> argparse.Namespace:
        parallel, seed = self.runner.parallel, self.runner.config.seed
        return argparse.Namespace(replays=replays, routing="model", eager=False, ep_share=parallel.ep, seed=seed)
