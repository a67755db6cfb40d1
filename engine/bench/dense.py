"""`python -m engine.bench dense`: the dense products of a layer on one rank of a tensor-parallel world (goal G3b).

Each product is timed over so many copies of its weight that no cache holds them, through the kernels that the layers
use and through the library's `F.linear`; inside a graph, on a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F

from engine.bench import share
from engine.bench.gpu_timing import read_bandwidth, time_calls
from engine.bench.report import Report, model_name
from engine.kernels import table
from engine.kernels.table import Kernels
from engine.model_files import ModelFiles

ROTATED_BYTES = {"cuda": 350 * 10**6, "cpu": 10**6}
MAX_COPIES = 96
G3B_US = 28.0  # the whole layer at 1 to 16 rows of a rank of 8 of the full model
FULL_WIDTH = 7168


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--tokens", default="1,4,16,64", help="rows of each measurement")


def products(config: Any, tp: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each product of a layer of one rank."""
    heads, inner = config.num_attention_heads // tp, config.moe_intermediate_size * config.n_shared_experts // tp
    width, queries = config.hidden_size, heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    first = config.q_lora_rank or queries
    low_rank = {"q_b": (queries, config.q_lora_rank)} if config.q_lora_rank else {}
    return {
        "q_a + kv_a": (first + config.kv_lora_rank + config.qk_rope_head_dim, width),
        **low_rank,
        "o": (width, heads * config.v_head_dim),
        "router + shared gate, up": (config.n_routed_experts + 2 * inner, width),
        "shared down": (width, inner),
    }


@torch.inference_mode()
def measure(
    kernels: Kernels,
    shape: tuple[int, int],
    rows: int,
    args: argparse.Namespace,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, float]:
    """Microseconds of one product through the kernels and through the library."""
    outputs, inputs = shape
    generator = torch.Generator(device).manual_seed(args.seed)
    copies = min(max(ROTATED_BYTES[device.type] // (outputs * inputs * dtype.itemsize), 2), MAX_COPIES)
    weights = [
        torch.randn(outputs, inputs, generator=generator, device=device, dtype=dtype) / inputs**0.5
        for _ in range(copies)
    ]
    x_TI = torch.randn(rows, inputs, generator=generator, device=device, dtype=dtype)
    result = {}
    for name, call in (("us", kernels.partial), ("library us", F.linear)):
        calls = [lambda weight=weight, call=call: call(x_TI, weight) for weight in weights]
        result[name] = time_calls(calls, device, args.replays, not args.eager).median * 1e6
    return result


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    tokens = share.parse_counts(args.tokens, "--tokens")
    config = share.share_config(args, 1)
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    model = ModelFiles.read(config).model_config
    kernels = table.KERNELS[table.choose(device, dtype)]()
    bandwidth = read_bandwidth(device)
    shapes = products(model, args.tp_share)
    rows = []
    for number in tokens:
        each = {name: measure(kernels, shape, number, args, dtype, device) for name, shape in shapes.items()}
        sizes = {name: outputs * inputs * dtype.itemsize for name, (outputs, inputs) in shapes.items()}
        each["layer"] = {key: sum(row[key] for row in each.values()) for key in ("us", "library us")}
        sizes["layer"] = sum(sizes.values())
        for name, row in each.items():
            fraction = sizes[name] / bandwidth / row["us"] * 1e6
            rows.append({"rows": number, "product": name, "MB": sizes[name] / 1e6, **row, "fraction": fraction})
            is_goal = name == "layer" and number <= 16 and model.hidden_size == FULL_WIDTH and args.tp_share == 8
            rows[-1]["goal us"] = G3B_US if is_goal else None
    notes = [
        f"Streaming read {bandwidth / 1e9:.0f} GB/s in this process; kernels: {kernels.name}.",
        "A figure holds its share of the gaps between kernels; a split sum is added up by the kernel that follows.",
    ]
    data = {
        "goals": "G3b",
        "model": model_name(args.model),
        "read_bytes_per_second": bandwidth,
        "settings": share.settings(args),
    }
    return Report(
        f"Dense products of a layer, one rank of {args.tp_share}: {model_name(args.model)}", rows, notes, data
    )
