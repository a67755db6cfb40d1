"""`python -m engine.bench comm`: rounds between ranks (goals G4 and G4b), by the doctor's probes.

G4: a fused reduce (sum over ranks, residual, RMSNorm) over the library's all-reduce and the two kernels that follow it.
G4b: dispatch and combine of sharded tokens over one all-reduce of the same rows. On GPUs all of it in CUDA graphs.
With --virtual-ranks what the exchange kernels take without links: all ranks on one GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from engine.bench.report import MeasurementError, Report, model_name
from engine.config import ConfigError
from engine.doctor.arguments import add_world_arguments, settings_of
from engine.doctor.examine import examine
from engine.doctor.findings import Findings, findings, measuring_world
from engine.doctor.placement import Placement
from engine.doctor.settings import Settings
from engine.doctor.team import Outcome, World

FUSED, SHARDED = "symm_replicated", "symm_sharded"
G4 = {1: 0.45, 2: 0.45, 4: 0.45, 8: 0.45, 128: 0.75}  # rows -> ratio, on two GPUs
G4B, G4B_MOST_ROWS = 1.0, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_world_arguments(parser)
    parser.add_argument(
        "--virtual-ranks",
        type=int,
        choices=(2, 4, 8),
        help="measure the kernels of so many ranks on one GPU, without links, in place of rounds between ranks",
    )


def hidden_fraction(step_seconds: float, silent_seconds: float, rounds_seconds: float) -> float:
    """G4c: the part of a step's rounds that other work hides.

    step_seconds: a step with its rounds; silent_seconds: the same step without them; rounds_seconds: the rounds alone.
    0 where every round adds its whole time, 1 where none adds any. Raises ValueError for rounds of no length.
    """
    if rounds_seconds <= 0:
        raise ValueError(f"rounds of {rounds_seconds} s cannot be hidden; measure them on more than one rank.")
    return 1 - (step_seconds - silent_seconds) / rounds_seconds


def run(args: argparse.Namespace) -> Report | None:
    """Raises ConfigError for a setting that cannot be measured, MeasurementError where the ranks could not."""
    if args.virtual_ranks:
        return _virtual(args)
    settings = settings_of(args)
    reports: list[Report | str] = []

    def conclude(outcomes: dict[str, Outcome]) -> int:
        found = findings(outcomes)
        reports.append(found.failed or report(settings, found, _unfused(settings, outcomes)))
        return 1 if found.failed else 0

    code = examine(settings, [_world(settings)], conclude)
    if reports and isinstance(reports[0], str):
        raise MeasurementError(reports[0])
    if code:
        raise MeasurementError("the rank that leads could not measure; its message says why.")
    return reports[0] if reports else None


def _virtual(args: argparse.Namespace) -> Report:
    if args.device == "cpu" or not torch.cuda.is_available():
        raise ConfigError(f"--virtual-ranks {args.virtual_ranks} measures GPU kernels; run it on a machine with a GPU.")
    if args.tp or args.ep or args.rows:
        raise ConfigError("--virtual-ranks has ranks and sizes of its own; leave out --tp, --ep and --rows.")
    from engine.bench import virtual_ranks  # needs Triton, which a machine without a GPU may lack

    return virtual_ranks.report(args.virtual_ranks, torch.device("cuda"))


def _world(settings: Settings) -> World:
    """The doctor's own probes, and what a fused reduce is held against."""
    world, rows = measuring_world(settings), _unfused_rows(settings)
    return World((*world.probes, f"unfused:{','.join(map(str, rows))}")) if rows and settings.tp > 1 else world


def _unfused_rows(settings: Settings) -> list[int]:
    return [t for t in settings.rows if t in G4]


def _unfused(settings: Settings, outcomes: Mapping[str, Outcome]) -> dict[int, float]:
    key = f"unfused:{','.join(map(str, _unfused_rows(settings)))}"
    value = outcomes[key].value if key in outcomes else None
    return {int(t): seconds for t, seconds in (value or {}).items()}


def report(settings: Settings, found: Findings, unfused: Mapping[int, float]) -> Report:
    """One row a size; every verb of every dispatcher is in the JSON."""
    config = settings.model_config()
    placement = Placement(config, settings.tp, settings.ep)
    rows = [_row(placement, found, unfused, t, settings.device == "cuda") for t in found.sizes()]
    notes = [
        "us, median of the slowest rank; dispatchers: a layer's rounds. G4: fused reduce over all-reduce, residual and "
        "norm. G4b: dispatch + combine over one all-reduce.",
        *(f"{name}: no figure: {reason}." for name, reason in found.refused.items()),
    ]
    data = {
        "goals": "G4, G4b",
        "model": model_name(settings.model),
        "world": {"tp": settings.tp, "ep": settings.ep, "device": settings.device},
        "collectives": found.collectives,
        "dispatchers": {
            name: {t: {verb: vars(one) for verb, one in vars(rounds).items()} for t, rounds in by_rows.items()}
            for name, by_rows in found.dispatchers.items()
        },
        "unfused": dict(unfused),
        "refused": found.refused,
        "read_bytes_per_second": found.read_rates,
        "simulate_link": settings.simulate_link,
    }
    title = f"Rounds between {settings.tp} ranks, experts {placement.name}, rows of {config.hidden_size} in bfloat16"
    return Report(title, rows, notes, data)


def _row(
    placement: Placement, found: Findings, unfused: Mapping[int, float], rows: int, has_goals: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {"T": rows}
    for name, by_rows in found.collectives.items():
        row[name] = by_rows[rows] * 1e6
    for name, by_rows in found.dispatchers.items():
        known = by_rows.get(rows)
        row[name] = None if known is None else placement.comm_seconds(known) / placement.verbs()[0] * 1e6
    plain = unfused.get(rows)
    fused, sharded = (found.dispatchers.get(name, {}).get(rows) for name in (FUSED, SHARDED))
    one_call = found.collectives.get("all-reduce", {}).get(rows)
    row["all-reduce, sum, norm"] = None if plain is None else plain * 1e6
    row["G4"] = None if None in (plain, fused) else fused.reduce.seconds / plain
    row["G4 goal"] = G4.get(rows) if has_goals else None
    exchanged = None if sharded is None else sharded.dispatch.seconds + sharded.combine.seconds
    row["G4b"] = None if None in (one_call, exchanged) else exchanged / one_call
    row["G4b goal"] = G4B if has_goals and rows <= G4B_MOST_ROWS else None
    return row
