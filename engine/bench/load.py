"""`python -m engine.bench load`: a load against the disk, and against a loop of safe_open(...).get_tensor.

Every arm begins with files that are not cached, and arms of a round follow each other, since disks have moods. Ranks
are processes that exchange nothing; each reads its own share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from engine.bench.load_arms import DISK_ARMS, PREPARE, pieces_of
from engine.bench.load_ranks import Ranks
from engine.bench.report import MeasurementError, Report, model_name, summarise
from engine.config import DEVICES, DTYPES, ConfigError, EngineConfig
from engine.loading import page_cache
from engine.loading.extent_reader import Extent
from engine.loading.weights import CheckpointError, weight_files

ARMS = ("disk", "load", "prepared", "safe_open")
_PATHS = ("model", "json", "prepared_weights")  # of one machine
MOST_CACHED = 0.01  # of the files' pages, for an arm that is to begin without


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint directory")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes at once, tp N and ep N (default 1)"
    )
    parser.add_argument("--tp-share", type=int, metavar="N", help="one rank of a world of N instead")
    parser.add_argument("--ep-share", type=int, metavar="M", help="expert groups of that world (default N)")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--arms", help=f"of {', '.join(ARMS)} (default: all that can run)")
    parser.add_argument("--prepared-weights", metavar="DIR", help="local disk for the arm prepared; stays there")
    parser.add_argument("--rounds", type=int, default=3, help="of all arms (default 3)")
    parser.add_argument("--no-drop-cache", action="store_true", help="begin with whatever is cached")


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for what cannot be measured, MeasurementError for a cache that stays warm."""
    config, arms = _config(args), _arms(args)
    try:
        files = weight_files(config.model)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    with Ranks(config, list(range(args.ranks))) as ranks:
        extents = ranks.extents()
        pieces = pieces_of([extent for own in extents for extent in own], args.ranks)
        if "prepared" in arms:
            ranks.run(PREPARE, pieces)
            files += sorted(Path(config.prepared_weights).glob("*.prepared"))
            _say(f"weights are prepared in {config.prepared_weights}")
        measured = _rounds(ranks, arms, pieces, files, args)
    return _report(args, config, measured, pieces, extents)


def _config(args: argparse.Namespace) -> EngineConfig:
    if args.ranks < 1 or args.rounds < 1:
        raise ConfigError(f"--ranks {args.ranks} and --rounds {args.rounds} must be at least 1.")
    if args.ranks > 1 and args.tp_share is not None:
        raise ConfigError(f"--tp-share is one rank of a world; leave --ranks {args.ranks} out.")
    if args.ep_share is not None and args.tp_share is None:
        raise ConfigError(f"--ep-share {args.ep_share} needs --tp-share, the size of the world it divides.")
    tp = args.tp_share or args.ranks
    config = EngineConfig(
        str(Path(args.model).absolute()),
        tp=tp,
        ep=args.ep_share or tp,
        device=args.device,
        dtype=args.dtype,
        prepared_weights=args.prepared_weights and str(Path(args.prepared_weights).absolute()),
    )
    config = config.resolve(torch.cuda.device_count())
    if config.device == "cuda" and args.ranks > torch.cuda.device_count():
        raise ConfigError(f"--ranks {args.ranks} needs as many GPUs, and here are {torch.cuda.device_count()}.")
    return config


def _arms(args: argparse.Namespace) -> list[str]:
    """Names of `load_arms`: the disk is read both ways."""
    possible = [arm for arm in ARMS if arm != "prepared" or args.prepared_weights]
    wanted = possible if args.arms is None else args.arms.split(",")
    if unknown := set(wanted) - set(ARMS):
        raise ConfigError(f"--arms names {', '.join(map(repr, sorted(unknown)))}; use some of {', '.join(ARMS)}.")
    if "prepared" in set(wanted) - set(possible):
        raise ConfigError("--arms names prepared; say with --prepared-weights DIR where the prepared files may be.")
    disks = list(DISK_ARMS) if "disk" in wanted else []
    return disks + [arm for arm in ARMS if arm != "disk" and arm in wanted]


def _rounds(
    ranks: Ranks, arms: list[str], pieces: list[list[Extent]], files: list[Path], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Arm -> one result a round."""
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(args.rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            if arm not in found:
                continue
            cached = _make_cold(files, not args.no_drop_cache)
            try:
                samples = ranks.run(arm, pieces)
            except ConfigError as error:
                if arm != "disk O_DIRECT":
                    raise
                _say(f"{arm}: {error}")
                del found[arm]
                continue
            found[arm].append(_together(samples, cached))
            _say(f"round {number + 1} of {args.rounds}: {arm}: {found[arm][-1]['seconds']:.2f} s")
    return found


def _make_cold(files: list[Path], drops: bool) -> float | None:
    """The share of the files that is cached now. Raises MeasurementError where it should be none and is some."""
    if drops:
        page_cache.drop(files)
    cached = page_cache.cached_share(files)
    if drops and cached is not None and cached > MOST_CACHED:
        raise MeasurementError(
            f"{cached:.0%} of the files stay cached, so a disk cannot be measured; end who maps them, or use "
            "--no-drop-cache."
        )
    return cached


def _together(samples: list[dict[str, Any]], cached: float | None) -> dict[str, Any]:
    """Of all ranks: from the first's begin to the last's end."""
    seconds = max(sample["ended"] for sample in samples) - min(sample["began"] for sample in samples)
    return {"seconds": seconds, "cached_before": cached, "ranks": samples}


def _report(
    args: argparse.Namespace,
    config: EngineConfig,
    measured: dict[str, list[dict[str, Any]]],
    pieces: list[list[Extent]],
    extents: list[list[Extent]],
) -> Report:
    union = sum(piece.size for own in pieces for piece in own)
    medians = {arm: statistics.median(one["seconds"] for one in results) for arm, results in measured.items()}
    disks = {arm: medians[arm] for arm in DISK_ARMS if arm in medians}
    disk = min(disks.values(), default=None)
    rows = [_row(arm, results, union, disk, medians.get("safe_open")) for arm, results in measured.items()]
    data = {
        "model": model_name(args.model),
        "world": {"tp": config.tp, "ep": config.ep, "ranks": args.ranks},
        "engine": {"device": config.device, "dtype": config.dtype},
        "bytes": {"union": union, "ranks": [sum(extent.size for extent in own) for own in extents]},
        "disk_arm": min(disks, key=disks.get, default=None),
        "settings": {name: value for name, value in vars(args).items() if name not in _PATHS},
        "rounds": measured,
    }
    title = f"Loading {union / 1e9:.2f} GB, {args.ranks} of {config.tp} ranks (ep {config.ep}), {config.device}, "
    return Report(title + f"{config.dtype}: {model_name(args.model)}", rows, _notes(args, measured), data)


def _row(
    arm: str, results: list[dict[str, Any]], union: int, disk: float | None, safe_open: float | None
) -> dict[str, Any]:
    summary = summarise([one["seconds"] for one in results])
    ranks = [sample for one in results for sample in one["ranks"]]
    known = [one for one in results if all(sample["from_disk"] is not None for sample in one["ranks"])]
    disk_bytes = [sum(sample["from_disk"] for sample in one["ranks"]) for one in known]
    return {
        "arm": arm,
        "seconds": summary.median,
        "spread": summary.spread,
        "GB/s": union / summary.median / 1e9,
        "of disk": disk and disk / summary.median,
        "s beyond disk": disk and summary.median - disk,
        "x safe_open": safe_open and safe_open / summary.median,
        "read from disk": statistics.median(disk_bytes) / union if disk_bytes else None,
        "host GB beyond": max(_host_beyond(sample) for sample in ranks) / 1e9,
        "GPU GB beyond": max(sample["gpu_peak"] - sample["weights"] for sample in ranks) / 1e9
        if any(sample["gpu_peak"] for sample in ranks)
        else None,
    }


def _host_beyond(sample: dict[str, Any]) -> int:
    """The peak beyond weights that are on the host."""
    return max(sample["host_peak"] - (0 if sample["gpu_peak"] else sample["weights"]), 0)


def _notes(args: argparse.Namespace, measured: dict[str, list[dict[str, Any]]]) -> list[str]:
    notes = [
        "GB/s: of the bytes that any rank wants, each once. of disk: against the faster of the disk arms; s beyond "
        "disk: seconds more than it. spread: (largest - smallest) / median.",
        "read from disk: what the ranks' reads took from it, of those bytes. GB beyond: the peak of any rank beyond "
        "its weights, pinned memory included.",
    ]
    cached = [one["cached_before"] for results in measured.values() for one in results]
    if None in cached:
        notes.append("cold cache: this kernel does not say what is cached.")
    else:
        notes.append(f"cached before an arm: at most {max(cached):.2%} of the files' pages.")
    for arm in ("load", "prepared"):
        if arm in measured:
            parts = [sample["parts"] for one in measured[arm] for sample in one["ranks"]]
            medians = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
            notes.append(
                f"{arm}, seconds: " + ", ".join(f"{name} {value:.2f}" for name, value in medians.items()) + "."
            )
    if "prepared" in measured:
        size = sum(sample["num_bytes"] for sample in measured["prepared"][0]["ranks"])
        notes.append(f"prepared: {size / 1e9:.2f} GB of prepared files; its GB/s are of the checkpoint's bytes too.")
    return notes


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)
