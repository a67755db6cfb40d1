"""`python -m engine.bench mla`: attention over the paged latent cache, one layer of one rank (goal G3).

Decode steps, over numbers or rows of bytes (--kv-cache), of requests whose context lies random in randomly scattered
blocks. Every call reads other blocks or another layer's, so that a cache keeps nothing; inside a graph, on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from engine.bench import share
from engine.bench.gpu_timing import read_bandwidth, time_calls
from engine.bench.report import Report, model_name
from engine.cache_plan import BLOCK_SIZE
from engine.config import KV_CACHE_DTYPES, ConfigError
from engine.model_runner import ModelRunner

LAYERS = 4
ROTATED_BYTES = 256 * 10**6  # several times the last-level cache
MAX_CALLS = 48
MAX_QUERIES = 16
# (batch, context, query tokens) -> microseconds, or fraction of the streaming rate; 8 heads
G3_US = {(1, 4096, 1): 8.0}
G3_FRACTION = {(1, 32768, 1): 0.50, (8, 32768, 1): 0.88}
G3_RATIO = {4: 1.06}  # query tokens -> time over that of one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--points", default="1@4096,8@4096,64@4096,1@32768,8@32768", help="batch@context")
    parser.add_argument("--queries", default="1,4", help="query tokens of each request (default 1,4)")
    parser.add_argument("--kv-cache", default="auto", help="kv_cache_dtype, one or both: auto,fp8 (default auto)")


def attention_call(
    runner: ModelRunner, layer: int, point: tuple[int, int, int], blocks: list[int], seed: int
) -> Callable[[], torch.Tensor]:
    """One call of attention: (batch, context, query tokens) over `blocks` of one layer's cache."""
    batch, context, queries = point
    attention, device = runner.model.layers[layer].self_attn, runner.parallel.device
    step = share.contexts_step(runner.model_config.vocab_size, batch, context, queries, blocks)
    inputs = runner.input_batch.build(step, runner.dispatchers.for_rows(step.num_tokens))
    shape = (batch * queries, attention.num_heads, runner.model.cache_width)
    q_THX = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    q_THX, cache, backend = q_THX.to(runner.model.dtype), runner.caches[layer], runner.model.backend
    _, w_v_HVC = attention.absorbed_weights()
    return lambda: backend.attend(q_THX, cache, inputs, attention.scale, w_v_HVC)


def num_calls(num_bytes: int) -> int:
    """Calls that read `num_bytes` each, so many that together they outgrow the caches."""
    return min(max(-(-ROTATED_BYTES // num_bytes), LAYERS), MAX_CALLS)


def calls_of(runner: ModelRunner, point: tuple[int, int, int], num_bytes: int, seed: int) -> list[Callable]:
    """Calls over disjoint blocks as long as there are any, one layer after the other."""
    batch, context, _ = point
    used = batch * share.blocks_of(context)
    order = share.shuffled_blocks(runner.num_blocks - 1, seed)
    turns = max(len(order) // used, 1)
    calls = []
    for index in range(num_calls(num_bytes)):
        first = index // LAYERS % turns * used
        calls.append(attention_call(runner, index % LAYERS, point, order[first : first + used], seed + index))
    return calls


@torch.inference_mode()
def measure(
    runner: ModelRunner, point: tuple[int, int, int], args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """One row: microseconds of a call, bytes of the cache it reads, fraction of the streaming rate."""
    batch, context, queries = point
    kind = runner.config.kv_cache_dtype
    token_bytes = share.sizes(runner).token_bytes if kind == "auto" else runner.caches.shape[-1]
    num_bytes = batch * context * token_bytes
    calls = calls_of(runner, point, num_bytes, args.seed)
    for call in calls:
        if not call().isfinite().all():
            raise RuntimeError(f"attention gave values that are not finite ({batch} @ {context}, {queries} queries).")
    timing = time_calls(calls, runner.parallel.device, args.replays, not args.eager)
    has_goal = kind == "auto"
    return {
        "cache": kind,
        "requests": batch,
        "context": context,
        "queries": queries,
        "KV MB": num_bytes / 1e6,
        "us": timing.median * 1e6,
        "spread": timing.spread,
        "GB/s": num_bytes / timing.median / 1e9,
        "fraction": num_bytes / timing.median / bandwidth,
        "goal us": G3_US.get(point) if has_goal else None,
        "goal fraction": G3_FRACTION.get(point) if has_goal else None,
        "times as fast as auto": None,
        "over 1 query": None,
        "goal over 1": G3_RATIO.get(queries) if has_goal else None,
        "timed": timing.mode,
    }


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    points = share.parse_points(args.points, "--points")
    queries = share.parse_counts(args.queries, "--queries")
    if max(queries) > MAX_QUERIES:
        raise ConfigError(f"--queries {max(queries)}: attention folds at most {MAX_QUERIES} query tokens of a request.")
    runners = [_runner(args, kind, points, max(queries)) for kind in _kinds(args.kv_cache)]
    runner = runners[0]
    bandwidth = read_bandwidth(runner.parallel.device)
    rows = [
        measure(one, (*point, number), args, bandwidth) for point in points for number in queries for one in runners
    ]
    _compare(rows)
    heads = runner.model.layers[0].self_attn.num_heads
    notes = [
        f"Streaming read {bandwidth / 1e9:.0f} GB/s in this process. spread: (p90 - p10) / median.",
        f"Backend {runner.model.backend.name}, blocks of {BLOCK_SIZE} tokens in random order.",
    ]
    data = {
        "goals": "G3",
        "model": model_name(args.model),
        "heads": heads,
        "backend": runner.model.backend.name,
        "read_bytes_per_second": bandwidth,
        "settings": share.settings(args),
    }
    return Report(f"Attention of a layer, {heads} heads: {model_name(args.model)}", rows, notes, data)


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if not set(kinds) <= set(KV_CACHE_DTYPES) or len(set(kinds)) < len(kinds):
        raise ConfigError(f"--kv-cache must be one or more of {', '.join(KV_CACHE_DTYPES)}, each once, not {text!r}.")
    return kinds


def _compare(rows: list[dict[str, Any]]) -> None:
    """Fills in each row's time over that of one query, and what rows of bytes gain."""
    times = {(row["cache"], row["requests"], row["context"], row["queries"]): row["us"] for row in rows}
    for row in rows:
        point = (row["requests"], row["context"])
        if row["queries"] > 1 and (row["cache"], *point, 1) in times:
            row["over 1 query"] = row["us"] / times[row["cache"], *point, 1]
        if row["cache"] != "auto" and ("auto", *point, row["queries"]) in times:
            row["times as fast as auto"] = times["auto", *point, row["queries"]] / row["us"]


def _runner(args: argparse.Namespace, kind: str, points: list[tuple[int, int]], queries: int) -> ModelRunner:
    overrides = {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS}
    most = max(batch for batch, _ in points)
    settings = {"max_num_batched_tokens": most * queries, "kv_cache_dtype": kind}
    config = share.share_config(args, 1, hf_overrides=overrides, **settings)
    longest = max(context for _, context in points)
    return share.build_runner(config, max(_blocks(args, *point) for point in points), longest, most)


def _blocks(args: argparse.Namespace, batch: int, context: int) -> int:
    """Enough that calls on the same layer read different blocks where one call alone fits a cache."""
    bytes_a_layer = batch * context * 1152  # latent and rope of the real model; only a size is chosen by it
    return batch * share.blocks_of(context) * -(-num_calls(bytes_a_layer) // LAYERS)
