"""Decoding with a draft at forced accept lengths, on real ranks, beside plain decoding by the same engine (goal G5).

Everything is computed and sent as in service, weights are made up, and only how many guesses count as accepted is
given: `engine.bench spec` with the sums over ranks. `measure` is for any world that one host holds.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.led import Led
from benchmarks.ranks import on_ranks
from engine.bench import share, spec_share
from engine.bench.forced import ForcedRunner
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.model_files import ModelFiles

LENGTHS = (2.0, 2.5, 3.0)
_ROOM = 512  # tokens of a request beside those that are counted


def measure(tp: int, ep: int, device: str, seconds: float, settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 found. settings: those of `rows_of_rank`. Raises RuntimeError as `on_ranks` does."""
    return on_ranks("benchmarks.eagle3_forced:rows_of_rank", settings, tp, ep, device, seconds)[0]


def rows_of_rank(
    parallel: ParallelState,
    model: str,
    overrides: dict[str, int],
    points: str,
    tokens: int,
    moe_comm: str = "auto",
    draft: str = "auto",
    lengths: tuple[float, ...] | list[float] = LENGTHS,
    num_draft_tokens: int = 3,
    replays: int = 30,
    chunk: int = 4096,
) -> dict[str, Any]:
    """{"costs": a row for each number of guesses of a step, "engine": a row for each accept length and plain decode}.

    points: "batch@context" pairs. tokens: that each request decodes. Lengths are those that num_draft_tokens guesses
    would have; the engine chooses how many to verify."""
    batches = share.parse_points(points, "points")
    contexts = [context + tokens + _ROOM for _, context in batches]
    config = EngineConfig(
        model=model, tp=parallel.tp, ep=parallel.ep, device=parallel.device.type, load_format="dummy",
        moe_comm=moe_comm, hf_overrides=overrides, draft=draft, num_draft_tokens=num_draft_tokens,
        max_num_batched_tokens=chunk, max_step_ms=0,
    ).resolve(torch.cuda.device_count())  # fmt: skip
    needs = [batch * share.blocks_of(context) for (batch, _), context in zip(batches, contexts, strict=True)]
    most = max(batch for batch, _ in batches)
    runner = share.build_runner(config, max(needs), max(contexts), most, parallel, ForcedRunner)
    files = ModelFiles.read(config)
    costs = [row for point in batches for row in spec_share.measure_costs(runner, *point, replays)]
    led = Led(parallel)
    engine = [row for point in batches for row in _rates(led, runner, files, point, lengths, tokens)]
    led.close()
    return {
        "costs": costs,
        "engine": engine,
        "layers": runner.model_config.num_hidden_layers,
        "dispatchers": runner.dispatchers.name,
        "graphs": runner.graphs is not None,
    }


def _rates(
    led: Led,
    runner: ForcedRunner,
    files: ModelFiles,
    point: tuple[int, int],
    lengths: tuple[float, ...] | list[float],
    tokens: int,
) -> list[dict[str, Any]]:
    def rate() -> dict[str, Any]:
        return led.run(
            runner, files, lambda control: spec_share.decode_rate(runner, files, *point, tokens, control=control)
        )

    def row(length: float | str, found: dict[str, Any]) -> dict[str, Any]:
        return {"batch": point[0], "context": point[1], "accept length": length, **found}

    with spec_share.without_draft(runner, point[0]):
        plain = rate()
    rows = [row("no draft", plain) | {"speedup": 1.0}]
    for length in lengths:
        runner.forced.set(length)
        found = rate()
        rows.append(row(length, found) | {"speedup": found["tok/s"] / plain["tok/s"]})
    return rows
