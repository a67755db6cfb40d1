"""`python -m engine.bench moe`: the complete routed experts of one layer on one rank (goal G2).

TP: every expert sliced over the world. EP: whole experts, at the mean and at the slowest rank's count of distinct
experts. Every call takes another layer's weights, another routing and other activations; inside a graph, on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from engine.bench import share
from engine.bench.gpu_timing import read_bandwidth, time_calls
from engine.bench.report import Report, model_name
from engine.bench.routing import mixing_weights, moe_layers, routings
from engine.config import ConfigError
from engine.kernels.reference import local_ids
from engine.model_runner import ModelRunner

LAYERS = 4
LAYOUTS = {"tp": "mean", "ep-mean": "mean", "ep-slowest": "slowest"}  # -> kind of routing
G2 = {"tp": {1: 0.42, 8: 0.72, 64: 0.82}, "ep-mean": {1: 0.42, 8: 0.75, 64: 0.85}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--tokens", default="1,4,8,16,64,256,2048", help="rows of each measurement")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)} (default: all)")


def experts_call(runner: ModelRunner, index: int, ids_TK: torch.Tensor, seed: int) -> Callable[[], torch.Tensor]:
    """One call of the experts of MoE layer `index` (modulo the layers there are) for rows with the router's ids."""
    layers = moe_layers(runner.model)
    experts, config, device = layers[index % len(layers)].experts, runner.model_config, runner.parallel.device
    generator = torch.Generator(device).manual_seed(seed + index)
    x_TD = torch.randn(ids_TK.shape[0], config.hidden_size, generator=generator, device=device)
    weights_TK = mixing_weights(*ids_TK.shape, config.routed_scaling_factor, seed + index).to(device)
    dispatcher = runner.dispatchers.for_rows(ids_TK.shape[0])
    ids_TK = local_ids(ids_TK, dispatcher.local_experts, torch.tensor(ids_TK.shape[0])).int()
    sent = dispatcher.dispatch(x_TD.to(runner.model.dtype), ids_TK.to(device), weights_TK)
    return lambda: experts(sent.x_RD, sent.expert_ids_RK, sent.weights_RK)


@torch.inference_mode()
def measure(
    runner: ModelRunner, layout: str, num_tokens: int, args: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """One row: microseconds of a call, bytes of the experts hit, fraction of the streaming rate."""
    config, parallel = runner.model_config, runner.parallel
    num_calls = 8 if num_tokens >= 64 else 16
    drawn = routings(
        LAYOUTS[layout],
        num_calls,
        num_tokens,
        config.n_routed_experts,
        config.num_experts_per_tok,
        parallel.ep,
        args.seed + num_tokens,
    )
    calls = [experts_call(runner, index, ids_TK, args.seed) for index, ids_TK in enumerate(drawn)]
    for call in calls:
        if not call().isfinite().all():
            raise RuntimeError(f"the experts gave values that are not finite ({layout}, {num_tokens} rows).")
    timing = time_calls(calls, parallel.device, args.replays, not args.eager)
    local = [ids_TK[ids_TK < config.n_routed_experts // parallel.ep] for ids_TK in drawn]
    distinct = sum(ids.unique().numel() for ids in local) / num_calls
    num_bytes = distinct * share.sizes(runner).expert_bytes
    return {
        "layout": layout,
        "rows": num_tokens,
        "experts hit": distinct,
        "pairs": sum(ids.numel() for ids in local) / num_calls,
        "MB": num_bytes / 1e6,
        "us": timing.median * 1e6,
        "spread": timing.spread,
        "GB/s": num_bytes / timing.median / 1e9,
        "fraction": num_bytes / timing.median / bandwidth,
        "goal": G2.get(layout, {}).get(num_tokens),
        "timed": timing.mode,
    }


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    tokens = share.parse_counts(args.tokens, "--tokens")
    layouts = args.layouts.split(",")
    unknown = [layout for layout in layouts if layout not in LAYOUTS]
    if unknown:
        raise ConfigError(f"--layouts {unknown[0]!r} is not known; use {', '.join(LAYOUTS)}.")
    rows, bandwidth = [], None
    for ep in (1, args.tp_share):
        mine = [layout for layout in layouts if (layout == "tp") == (ep == 1)]
        if not mine:
            continue
        runner = _runner(args, ep, max(tokens))
        bandwidth = bandwidth or read_bandwidth(runner.parallel.device)
        rows += [measure(runner, layout, number, args, bandwidth) for layout in mine for number in tokens]
        del runner  # its memory is needed by the next one
    notes = [
        f"Streaming read {bandwidth / 1e9:.0f} GB/s in this process. MB: INT4 weights of the experts hit; pairs: of a "
        "row and an expert of this rank. spread: (p90 - p10) / median.",
        f"{LAYERS} layers of weights in turn, a new routing in every call.",
    ]
    data = {
        "goals": "G2",
        "model": model_name(args.model),
        "read_bytes_per_second": bandwidth,
        "settings": share.settings(args),
    }
    return Report(
        f"Routed experts of a layer, one rank of {args.tp_share}: {model_name(args.model)}", rows, notes, data
    )


def _runner(args: argparse.Namespace, ep: int, num_tokens: int) -> ModelRunner:
    overrides = {"num_hidden_layers": LAYERS, "first_k_dense_replace": 0}
    config = share.share_config(args, ep, hf_overrides=overrides, max_num_batched_tokens=num_tokens)
    return share.build_runner(config, 1, 64)
