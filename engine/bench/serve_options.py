"""The options of `engine.bench serve`, what they default to, and the engine they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine.config import DEVICES, DTYPES, FULL_CONFIG, TINY_CHECKPOINT, ConfigError, EngineConfig

BASELINE = "-uncached"
ARMS = ("in-process", "http", "in-process" + BASELINE, "http" + BASELINE)
TRACES = ("fixed", "shared-prefix", "agents")
_GPU = {"prompt_tokens": 1024, "output_tokens": 256, "ttft_limit_ms": 2000.0, "itl_limit_ms": 50.0}
_CPU = {"prompt_tokens": 128, "output_tokens": 32, "ttft_limit_ms": 5000.0, "itl_limit_ms": 500.0}
_USUAL = {
    "arms": "in-process,http",
    "trace": "fixed",
    "clients": "1,8,64",
    "rounds": 3,
    "waves": 1,
    "share": 0.9,
    "groups": 1,
    "turns": 12,
    "think": 1.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "http": {"rounds": 5},
    "prefix": {
        "arms": "in-process,in-process" + BASELINE,
        "trace": "shared-prefix",
        "clients": "1",
        "waves": {"cuda": 16, "cpu": 8},
        "output_tokens": 8,
        "prompt_tokens": {"cuda": 8192, "cpu": 1024},
    },
    "agents": {"arms": "http,http" + BASELINE, "trace": "agents", "clients": "4", "waves": 2, "rounds": 1},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join(PRESETS)
    parser.add_argument("--preset", default="http", metavar="A,B", help=f"loads, one after the other: {known} (http)")
    load = parser.add_argument_group("load")
    load.add_argument("--arms", metavar="A,B", help=f"of {', '.join(ARMS)}")
    load.add_argument("--clients", metavar="N,M", help="closed loop: clients at a time, a point each (1,8,64)")
    load.add_argument("--rate", metavar="R,S", help="open loop instead: sessions a second, a point each")
    load.add_argument("--requests", type=int, help="sessions of a sample (default: --waves times the clients, or 32)")
    load.add_argument("--waves", type=int, help="sessions of each client (1)")
    load.add_argument("--rounds", type=int, help="times that each arm is measured (3)")
    load.add_argument("--trace", choices=TRACES, help="what the requests are (fixed)")
    load.add_argument("--prompt-tokens", type=int, help="of a request (1024 on a GPU, 128 on a CPU)")
    load.add_argument("--output-tokens", type=int, help="of an answer (256 on a GPU, 32 on a CPU)")
    load.add_argument("--share", type=float, help="shared-prefix: part of the prompt that a group shares (0.9)")
    load.add_argument("--groups", type=int, help="shared-prefix: groups (1)")
    load.add_argument("--turns", type=int, help="agents: mean turns of a session (12)")
    load.add_argument("--think", type=float, help="agents: factor of the times between turns (1)")
    load.add_argument("--scale", type=float, help="agents: factor of all lengths (default: 1 for a context of 128k)")
    load.add_argument("--host-cost", action="store_true", help="also the host's work for a decode step, by parts")
    load.add_argument("--ttft-limit-ms", type=float, help="of a good request (2000 on a GPU, 5000 on a CPU)")
    load.add_argument("--itl-limit-ms", type=float, help="of a good request, p99 (50 on a GPU, 500 on a CPU)")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", help="directory (default: Kimi-K2.5's config on a GPU, the tiny model on a CPU)")
    engine.add_argument("--tp-share", type=int, metavar="N", help="one rank's share of N (8 with a made-up model)")
    engine.add_argument("--tp", type=int, default=1, help="real ranks in place of a share, which this starts (1)")
    engine.add_argument("--ep", type=int, default=1, help="expert groups of the real ranks (1)")
    engine.add_argument("--moe-comm", default="auto", help="dispatcher of the real ranks (auto)")
    engine.add_argument("--layers", type=int, help="of a made-up model, fewer than its own")
    engine.add_argument("--experts", type=int, help="of a layer of a made-up model, fewer than its own")
    engine.add_argument("--device", choices=DEVICES, default="auto")
    engine.add_argument("--dtype", choices=DTYPES, default="auto")
    engine.add_argument("--draft", help="EAGLE-3 draft directory, or auto")
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--max-num-seqs", type=int, default=64)
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048)
    engine.add_argument("--max-step-ms", type=float)
    engine.add_argument("--kv-cache-memory-gb", type=float)
    engine.add_argument("--eager", action="store_true", help="without CUDA graphs")
    engine.add_argument("--seed", type=int, default=0, help="of weights, traces and arrivals")


def plans_of(args: argparse.Namespace, has_gpu: bool) -> list[argparse.Namespace]:
    """The options of each preset that was asked for, whole. Raises ConfigError for what cannot be measured."""
    plans = [argparse.Namespace(**vars(args) | {"preset": preset}) for preset in args.preset.split(",")]
    for plan in plans:
        if plan.preset not in PRESETS:
            raise ConfigError(f"--preset {plan.preset!r} is not known; use some of {', '.join(PRESETS)}.")
        _fill_in(plan, has_gpu)
    return plans


def _fill_in(args: argparse.Namespace, has_gpu: bool) -> None:
    """Puts the preset's value, else the usual one, where none was given."""
    device = args.device if args.device != "auto" else "cuda" if has_gpu else "cpu"
    usual = _USUAL | (_GPU if device == "cuda" else _CPU) | PRESETS[args.preset]
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value[device] if isinstance(value, dict) else value)
    if args.model is None:
        args.model = str(FULL_CONFIG if device == "cuda" else TINY_CHECKPOINT)
    _check(args)


def _check(args: argparse.Namespace) -> None:
    unknown = [arm for arm in args.arms.split(",") if arm not in ARMS]
    if unknown:
        raise ConfigError(f"--arms {unknown[0]!r} is not known; use some of {', '.join(ARMS)}.")
    for name in ("rounds", "waves", "prompt_tokens", "output_tokens", "groups", "turns"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}.")
    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests must be at least 1, not {args.requests}.")
    if not 0 <= args.share <= 1:
        raise ConfigError(f"--share must be from 0 to 1, not {args.share}.")
    for name in ("think", "ttft_limit_ms", "itl_limit_ms"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(args, name)}.")
    one_rank_alone = args.tp_share or args.host_cost or any(arm.endswith(BASELINE) for arm in args.arms.split(","))
    if args.tp > 1 and one_rank_alone:
        raise ConfigError("--tp above 1 goes with no --tp-share, no --host-cost and no uncached arm; leave them out.")
    if args.scale is not None and args.scale <= 0:
        raise ConfigError(f"--scale must be above 0, not {args.scale}.")


def points_of(args: argparse.Namespace) -> list[tuple[str, int | None, float | None]]:
    """(name, clients, sessions a second) of each point; raises ConfigError."""
    if args.rate is None:
        counts = _numbers(args.clients, "--clients", int)
        return [(f"{args.preset}, {count} client{'s' * (count > 1)}", count, None) for count in counts]
    return [(f"{args.preset}, {rate:g}/s", None, rate) for rate in _numbers(args.rate, "--rate", float)]


def _numbers(text: str, option: str, kind: type) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if not all(0 < value < 2**31 for value in values):
        raise ConfigError(f"{option} must be numbers above 0 such as 1,8, not {text!r}.")
    return values


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine asked for. A directory without weights is made up, one rank's share of it or --tp ranks."""
    made_up = args.tp_share is not None or Path(args.model).resolve() == FULL_CONFIG
    overrides = {"num_hidden_layers": args.layers, "n_routed_experts": args.experts}
    overrides = {name: number for name, number in overrides.items() if number is not None}
    if overrides and not made_up:
        raise ConfigError("--layers and --experts are for a made-up model; add --tp-share, or leave them out.")
    return EngineConfig(
        model=args.model,
        tp=args.tp,
        ep=args.ep,
        moe_comm=args.moe_comm,
        tp_share=args.tp_share or (8 if made_up and args.tp == 1 else None),
        load_format="dummy" if made_up else "auto",
        hf_overrides=overrides,
        device=args.device,
        dtype=args.dtype,
        draft=args.draft,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_step_ms=args.max_step_ms,
        kv_cache_memory_gb=args.kv_cache_memory_gb,
        enforce_eager=args.eager,
        seed=args.seed,
    )
