"""`python -m engine.bench chunks`: steps with a part of a prompt on one rank's share, without graphs and with those of
what lies between attentions (engine.segments).

Each point is one step among its like, tokens read one step behind, as serving runs them. A share makes no sums over
ranks.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from engine.bench import share
from engine.bench.report import Report, model_name
from engine.bench.step_timing import time_steady, without_graphs
from engine.config import ConfigError, EngineConfig
from engine.model_runner import ModelRunner
from engine.scheduler import SchedulerOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--ep-share", type=int, default=1, metavar="M", help="expert groups of the world (default 1)")
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--tokens", default="16,64,128,256,512,1024,2048", help="of the prompt in a step")
    parser.add_argument("--contexts", default="0,8192", help="tokens of the prompt that are cached")
    parser.add_argument("--decodes", default="0,8", help="requests that decode in the same step")
    parser.add_argument("--decode-context", type=int, default=4096, help="tokens of each of those (default 4096)")


def chunk_step(
    runner: ModelRunner, num_tokens: int, context: int, decodes: int, decode_context: int
) -> SchedulerOutput:
    """The last `num_tokens` of a prompt behind `context` others, and decodes before them as the scheduler has them."""
    blocks = share.shuffled_blocks(runner.num_blocks - 1, seed=num_tokens)
    vocabulary = runner.model_config.vocab_size // runner.parallel.tp  # tokens below it have an embedding on rank 0
    beside = share.contexts_step(vocabulary, decodes, decode_context, 1, blocks, seed=1)
    left = blocks[decodes * share.blocks_of(decode_context) :]
    chunk = share.contexts_step(vocabulary, 1, context + num_tokens, num_tokens, left)
    return SchedulerOutput([*beside.scheduled, *chunk.scheduled])


def measure_point(
    runner: ModelRunner, num_tokens: int, context: int, decodes: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One row: times of the step at once and replayed; no times of a replay where there is none of its size."""
    output = chunk_step(runner, num_tokens, context, decodes, args.decode_context)
    segments = runner.segments and runner.segments.choose(output.num_tokens)
    with without_graphs(runner):
        eager, eager_host = time_steady(runner, output, args.replays)
    row = {"tokens": num_tokens, "context": context, "decodes": decodes, "eager ms": eager.median * 1e3}
    row |= {"eager spread": eager.spread, "eager host ms": eager_host * 1e3}
    if not segments:
        return row | dict.fromkeys(("graph rows", "ms", "spread", "host ms", "eager / ms"))
    timing, host = time_steady(runner, output, args.replays)
    return row | {
        "graph rows": segments.num_rows,
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "host ms": host * 1e3,
        "eager / ms": eager.median / timing.median,
    }


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    tokens = share.parse_counts(args.tokens, "--tokens")
    contexts = _counts_from_0(args.contexts, "--contexts")
    decodes = _counts_from_0(args.decodes, "--decodes")
    if args.decode_context < 1:
        raise ConfigError(f"--decode-context must be at least 1, not {args.decode_context}.")
    runner = _runner(args, max(tokens), max(contexts), max(decodes))
    points = itertools.product(decodes, contexts, tokens)
    rows = [measure_point(runner, count, context, beside, args) for beside, context, count in points]
    layers = runner.model_config.num_hidden_layers
    notes = [
        f"tokens: of a prompt in the step, behind context others; decodes: beside it, at {args.decode_context} tokens.",
        "ms: a step among its like, tokens read one step behind; host ms: until its launch returns; eager: without "
        "graphs. spread: (p90 - p10) / median.",
        "graph rows: those of the graphs between attentions that the step replays; none: it runs without.",
    ]
    data = {
        "model": model_name(args.model),
        "layers": layers,
        "world": {"tp": runner.parallel.tp, "ep": runner.parallel.ep},
        "graph_bytes": _graph_bytes(runner),
        "settings": share.settings(args),
    }
    title = f"Steps with a part of a prompt on one rank of TP{args.tp_share}, EP{args.ep_share}, {layers} layers: "
    return Report(title + model_name(args.model), rows, notes, data)


def _graph_bytes(runner: ModelRunner) -> dict[str, Any]:
    """What captures took: of decode steps together, of each number of rows between attentions."""
    segments = {} if runner.segments is None else runner.segments.captured
    decodes = 0 if runner.graphs is None else runner.graphs.num_bytes
    return {"decodes": decodes, "rows": {str(size): one.num_bytes for size, one in segments.items()}}


def _runner(args: argparse.Namespace, tokens: int, context: int, decodes: int) -> ModelRunner:
    overrides = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config: EngineConfig = share.share_config(
        args, args.ep_share, hf_overrides=overrides, max_num_batched_tokens=tokens + decodes
    )
    needs = share.blocks_of(context + tokens) + decodes * share.blocks_of(args.decode_context)
    return share.build_runner(config, needs, max(context + tokens, args.decode_context), decodes + 1)


def _counts_from_0(text: str, option: str) -> list[int]:
    """ "0,8" -> [0, 8]. Raises ConfigError."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise ConfigError(f"{option} must be whole numbers from 0 on such as 0,8192, not {text!r}.")
    return [int(part) for part in text.split(",")]
