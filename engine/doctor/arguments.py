"""The options that decide which ranks measure what; the doctor's and `engine.bench comm`'s."""

from __future__ import annotations

import argparse

import torch

from engine.cache_plan import GIB
from engine.comm.dispatcher import DISPATCHERS
from engine.config import FULL_CONFIG, KV_CACHE_DTYPES, ConfigError
from engine.doctor.examine import local_ranks, torchrun_ranks
from engine.doctor.settings import MOST_ROWS, MOST_ROWS_ON_CPU, ROWS, Settings


def add_world_arguments(one: argparse.ArgumentParser) -> None:
    """What decides which ranks measure what."""
    one.add_argument("--tp", type=int, help="ranks (default: the GPUs of this host, torchrun's ranks, or 1)")
    one.add_argument("--ep", type=int, help="expert groups of the ranks (default: --tp, whole experts)")
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    one.add_argument("--model", default=str(FULL_CONFIG), metavar="DIR", help="a config.json, default the full model's")
    one.add_argument("--rows", help="sizes to measure (default 1,2,4 and so on to 512, on processors to 64)")
    one.add_argument("--dispatchers", default=",".join(DISPATCHERS), help="those to measure (default all)")
    one.add_argument("--seconds", type=float, default=60.0, help="limit of the whole run (default %(default)g)")
    one.add_argument(
        "--simulate-link",
        metavar="US,GB/S[,BYTES,FACTOR]",
        help="add the delay of such a link to every round; a call of BYTES or more takes FACTOR times as long",
    )


def add_memory_arguments(one: argparse.ArgumentParser) -> None:
    """What the model is to fit with, and into what."""
    group = one.add_argument_group("memory")
    group.add_argument(
        "--memory", action="store_true", help="say what fits, measure nothing; exit code 1 if it does not"
    )
    group.add_argument("--gpus", type=int, metavar="N", help="for so many GPUs instead of this host's; means --memory")
    group.add_argument("--gpu-memory-gb", type=float, metavar="GIB", help="for GPUs of such memory; means --memory")
    group.add_argument("--draft", help="EAGLE-3 draft directory, or auto (default: none)")
    group.add_argument("--max-model-len", type=int, help="tokens that the longest request must have room for")
    group.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")


def settle_memory_arguments(args: argparse.Namespace) -> None:
    """GPUs given by hand are not these, so that nothing is measured. Raises ConfigError."""
    for name in ("gpus", "gpu_memory_gb"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {value:g}.")
    args.memory = args.memory or args.gpus is not None or args.gpu_memory_gb is not None
    if args.memory:
        args.tp = args.tp or args.gpus or max(torch.cuda.device_count(), 1)
        args.device = "cpu"


def given_memory(args: argparse.Namespace) -> int | None:
    """Bytes of a GPU: as given, or of this host's first one, None without any."""
    if args.gpu_memory_gb is not None:
        return int(args.gpu_memory_gb * GIB)
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else None


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ConfigError."""
    gpus = torch.cuda.device_count()
    device = args.device if args.device != "auto" else ("cuda" if gpus else "cpu")
    many = torchrun_ranks()
    for name in ("tp", "ep"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} is a number of ranks from 1 on, not {getattr(args, name)}.")
    tp = args.tp or (many if many > 1 else max(gpus, 1) if device == "cuda" else 1)
    dispatchers = tuple(dict.fromkeys(filter(None, args.dispatchers.split(","))))
    settings = Settings(
        tp,
        args.ep or tp,
        device,
        args.model,
        _rows(args, device),
        dispatchers,
        simulate_link=args.simulate_link,
        seconds=args.seconds,
        draft=getattr(args, "draft", None),
        max_model_len=getattr(args, "max_model_len", None),
        kv_cache_dtype=getattr(args, "kv_cache_dtype", "auto"),
    )
    settings.check(gpus)
    if device == "cuda" and local_ranks(settings) > gpus:
        raise ConfigError(f"--tp {tp} needs {local_ranks(settings)} GPUs on this host, but it has {gpus}.")
    return settings


def _rows(args: argparse.Namespace, device: str) -> tuple[int, ...]:
    if args.rows is None:
        return tuple(t for t in ROWS if device == "cuda" or t <= MOST_ROWS_ON_CPU)
    try:
        return tuple(sorted({int(part) for part in args.rows.split(",")}))
    except ValueError as error:
        raise ConfigError(f"--rows takes whole numbers from 1 to {MOST_ROWS}, for example 1,4,16.") from error
