"""`python -m engine.bench step`: whole steps of one rank's share (goals G1, G7, G10), and a prefill chunk (G11).

Each point is one decode step of a batch whose context lies random in the cache, through the same code as serving. The
roofline is the weights that the step touches, with the distinct experts of its own routing, and the context's cache,
over the streaming read rate of the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.bench import share
from engine.bench.gpu_timing import Timing, matmul_peak, read_bandwidth, time_host
from engine.bench.report import Report, model_name
from engine.bench.routing import KINDS, counted_experts, fixed_routing
from engine.bench.step_timing import captured, graph_of, profile, time_device, time_steady, without_graphs
from engine.config import ConfigError
from engine.model_runner import ModelRunner
from engine.scheduler import SchedulerOutput

G1 = {(1, 4096): 0.45, (8, 4096): 0.55, (64, 2048): 0.70}  # (batch, context) -> fraction, TP8 share of the full model
G11 = 0.40
FULL_LAYERS = 61
PREFILL_REPLAYS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--ep-share", type=int, default=1, metavar="M", help="expert groups of the world (default 1)")
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--points", default="1@4096,4@4096,8@4096,64@2048", help="batch@context of decode steps")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of a fresh prompt, 0 for none (default 8192)")
    parser.add_argument(
        "--routing",
        choices=("model", *KINDS),
        default="model",
        help="model: as the made-up router decides; mean, slowest: as that rank of the world meets it",
    )


def step_callable(runner: ModelRunner, batch: int, context: int) -> Callable[[], Any]:
    """One decode step of `batch` requests at `context` tokens, run by each call; the same step every time."""
    output = decode_step(runner, batch, context)
    return lambda: runner.execute(output)


def decode_step(runner: ModelRunner, batch: int, context: int) -> SchedulerOutput:
    blocks = share.shuffled_blocks(runner.num_blocks - 1, seed=batch)
    return share.contexts_step(_vocabulary(runner), batch, context, 1, blocks, seed=context)


def prefill_step(runner: ModelRunner, num_tokens: int) -> SchedulerOutput:
    blocks = share.shuffled_blocks(runner.num_blocks - 1, seed=num_tokens)
    return share.contexts_step(_vocabulary(runner), 1, num_tokens, num_tokens, blocks)


def _vocabulary(runner: ModelRunner) -> int:
    """Tokens below it have an embedding on rank 0."""
    return runner.model_config.vocab_size // runner.parallel.tp


def measure_point(
    runner: ModelRunner, batch: int, context: int, args: argparse.Namespace, bandwidth: float, with_eager: bool = False
) -> dict[str, Any]:
    """One row: times, bytes and fraction of the roofline of a decode step."""
    with _routing(runner, batch, args):
        with counted_experts(runner.model) as experts:
            check_finite(runner, batch, context)
        output = decode_step(runner, batch, context)
        timing, host = time_steady(runner, output, args.replays)
        details = _details(runner, output, args, timing)
        if with_eager and not args.eager:
            with without_graphs(runner):
                eager = time_host(lambda: runner.execute(output).read(), runner.parallel.device, args.replays)
            details |= {"eager ms": eager.median * 1e3, "eager / ms": eager.median / timing.median}
    sizes = share.sizes(runner)
    weights, cache = sizes.weight_bytes(sum(experts.distinct)), sizes.kv_bytes(batch * context)
    roofline = (weights + cache) / bandwidth
    return {
        "step": f"decode {batch} @ {context}",
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "tok/s": batch / timing.median,
        "roofline ms": roofline * 1e3,
        "fraction": roofline / timing.median,
        "goal": G1.get((batch, context)) if _is_goals_share(runner) else None,
        "host us": host * 1e6,
        **details,
        "experts a layer": _mean(experts.distinct),
        "weights GB": weights / 1e9,
        "KV GB": cache / 1e9,
    }


@contextmanager
def _routing(runner: ModelRunner, batch: int, args: argparse.Namespace) -> Iterator[None]:
    """The given routing of steps of `batch` rows, also in the graph that they replay."""
    if args.routing == "model":
        yield
        return
    with fixed_routing(runner.model, args.routing, batch, args.ep_share, args.seed), captured(runner, batch):
        yield


def _details(
    runner: ModelRunner, output: SchedulerOutput, args: argparse.Namespace, steady: Timing
) -> dict[str, float | None]:
    """What the device does by itself; nothing of it without a graph."""
    graph = graph_of(runner, output)
    if graph is None:
        return dict.fromkeys(("device ms", "idle", "kernels a layer", "busy"))
    device = time_device(graph, args.replays).median
    kernels = profile(graph)
    return {
        "device ms": device * 1e3,
        "idle": (steady.median - device) / steady.median,
        "kernels a layer": kernels.count / runner.model_config.num_hidden_layers,
        "busy": kernels.busy,
    }


def _is_goals_share(runner: ModelRunner) -> bool:
    """Whether this is the share that the goals are set for."""
    is_full = runner.model_config.num_hidden_layers == FULL_LAYERS
    return is_full and (runner.parallel.tp, runner.parallel.ep) == (8, 1)


def measure_prefill(runner: ModelRunner, num_tokens: int, args: argparse.Namespace, peak: float) -> dict[str, Any]:
    """One row in the columns of `measure_point`; fraction: model FLOPs over time and the peak of a large product."""
    output = prefill_step(runner, num_tokens)
    with counted_experts(runner.model) as experts, without_graphs(runner):  # a graph runs nothing that counts
        runner.execute(output)
    replays = min(args.replays, PREFILL_REPLAYS)
    timing = time_host(lambda: runner.execute(output), runner.parallel.device, replays)
    flops = share.sizes(runner).prefill_flops(num_tokens, sum(experts.pairs))
    return {
        "step": f"prefill {num_tokens}",
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "tok/s": num_tokens / timing.median,
        "experts a layer": _mean(experts.distinct),
        "TFLOP": flops / 1e12,
        "roofline ms": flops / peak * 1e3,
        "fraction": flops / peak / timing.median,
        "goal": G11 if _is_goals_share(runner) else None,
    }


@torch.inference_mode()
def check_finite(runner: ModelRunner, batch: int, context: int) -> None:
    """Runs the step's layers eagerly; raises RuntimeError where their output is not finite."""
    step = decode_step(runner, batch, context)
    inputs = runner.input_batch.build(step, runner.dispatchers.for_rows(step.num_tokens))
    hidden_TD = runner.model(inputs, runner.caches)
    if not hidden_TD.isfinite().all():
        raise RuntimeError(f"the step of {batch} @ {context} gave values that are not finite.")


def communication(runner: ModelRunner, batch: int, context: int) -> dict[str, dict[str, int]]:
    """Rounds and bytes by kind that a decode step counts; a share makes every round and sends nothing."""
    output = decode_step(runner, batch, context)
    with runner.parallel.meter.apart() as sends:
        runner.execute(output).read()
    return {"rounds": sends.rounds, "bytes": sends.bytes}


def _mean(values: list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    points = share.parse_points(args.points, "--points")
    if args.prefill < 0:
        raise ConfigError(f"--prefill must be 0 or more, not {args.prefill}.")
    runner = _runner(args, points)
    device = runner.parallel.device
    bandwidth = read_bandwidth(device)
    peak = matmul_peak(device, getattr(torch, runner.config.dtype))
    rows = [measure_point(runner, *point, args, bandwidth, with_eager=point == points[0]) for point in points]
    if args.prefill:
        rows.append(measure_prefill(runner, args.prefill, args, peak))
    layers = runner.model_config.num_hidden_layers
    notes = [
        f"Streaming read {bandwidth / 1e9:.0f} GB/s, large product {peak / 1e12:.3g} TFLOP/s, both in this process.",
        "fraction: of the byte roofline (G1); of the large product's rate for prefill (G11).",
        f"spread: (p90 - p10) / median. Routing: {args.routing}.",
        "ms: a step among its like, tokens read one step behind (eager / ms: G7). device ms: its graph alone.",
        "host us: filling and launching it; idle: (ms - device ms) / ms (G10). busy: share of a replay with a kernel "
        "running.",
    ]
    data = {
        "goals": "G1, G7, G10, G11",
        "model": model_name(args.model),
        "layers": layers,
        "world": {"tp": runner.parallel.tp, "ep": runner.parallel.ep},
        "share_gb": share.sizes(runner).total_bytes() / 1e9,
        "read_bytes_per_second": bandwidth,
        "matmul_flops_per_second": peak,
        "routing": args.routing,
        "communication_a_step": communication(runner, *points[0]),
        "settings": share.settings(args),
    }
    title = f"Steps of one rank of TP{args.tp_share}, EP{args.ep_share}, {layers} layers: {model_name(args.model)}"
    return Report(title, _same_columns(rows), notes, data)


def _runner(args: argparse.Namespace, points: list[tuple[int, int]]) -> ModelRunner:
    overrides = {} if args.layers is None else {"num_hidden_layers": args.layers}
    most = max(args.prefill, *(batch for batch, _ in points))
    config = share.share_config(args, args.ep_share, hf_overrides=overrides, max_num_batched_tokens=most)
    needs = [batch * share.blocks_of(context) for batch, context in points] + [share.blocks_of(args.prefill)]
    longest = max(args.prefill, *(context for _, context in points))
    return share.build_runner(config, max(needs), longest, max(batch for batch, _ in points))


def _same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]
