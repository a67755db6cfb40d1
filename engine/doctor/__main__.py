"""`python -m engine.doctor`: measures this machine's links and says what they do to the model.

Needs no weights. Starts the ranks it needs by itself, or joins those of torchrun. Exit code 0 when it could measure,
1 with the reason when it could not, 2 for a setting that makes no sense.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.bench.report import environment
from engine.config import ConfigError
from engine.doctor import plot
from engine.doctor.arguments import (
    add_memory_arguments,
    add_world_arguments,
    given_memory,
    settings_of,
    settle_memory_arguments,
)
from engine.doctor.diagnosis import Diagnosis, diagnose
from engine.doctor.examine import examine, local_ranks
from engine.doctor.findings import findings, measuring_world
from engine.doctor.links import Links, inspect
from engine.doctor.memory import memory_section
from engine.doctor.report import links_section
from engine.doctor.settings import Settings
from engine.doctor.settle import settling_worlds
from engine.doctor.team import Outcome


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(prog="python -m engine.doctor", description=__doc__.splitlines()[0])
    add_world_arguments(main_parser)
    main_parser.add_argument("--quick", action="store_true", help="the latency table alone, no trial of NCCL settings")
    main_parser.add_argument(
        "--plain-tok-s",
        type=float,
        metavar="X",
        help="tokens/s of plain decoding of one request, measured on this machine: replaces the kernels' efficiency",
    )
    add_memory_arguments(main_parser)
    main_parser.add_argument("--json", metavar="FILE", help="write everything there too, for scripts")
    main_parser.add_argument("--plot", metavar="FILE.png", help="draw latency over rows (extra plot: matplotlib)")
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ranks end in order
    try:
        settle_memory_arguments(args)
        settings = settings_of(args)
        if args.json and not Path(args.json).absolute().parent.is_dir():
            raise ConfigError(f"--json {args.json}: its folder does not exist; make it first.")
        if args.plot:
            plot.check(args.plot)
        command = ["python", "-m", "engine.doctor", *arguments]
        return _weigh(args, settings, command) if args.memory else _run(args, settings, command)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _weigh(args: argparse.Namespace, settings: Settings, command: Sequence[str]) -> int:
    section, data = memory_section(settings, given_memory(args))
    if os.environ.get("RANK", "0") == "0":
        print(section.text())
        if args.json:
            Path(args.json).write_text(json.dumps(environment(command) | {"memory": data}, indent=2) + "\n")
    return 0 if data["fits"] else 1


def _run(args: argparse.Namespace, settings: Settings, command: Sequence[str]) -> int:
    settles = settings.device == "cuda" and settings.tp > 1 and not args.quick
    worlds = [measuring_world(settings), *(settling_worlds() if settles else [])]
    seen: list[Links] = []

    def look() -> None:
        seen.append(inspect(local_ranks(settings) if settings.device == "cuda" else 0))

    def conclude(outcomes: dict[str, Outcome]) -> int:
        found = findings(outcomes)
        if found.failed is not None:
            links = links_section(seen[0])
            print(links.text() if links else "", end="\n" if links else "")
            print(f"error: {found.failed}", file=sys.stderr)
            return 1
        result = diagnose(settings, seen[0], found, outcomes, args.plain_tok_s, args.quick)
        _publish(result, args, command)
        return 0

    return examine(settings, worlds, conclude, look)


def _publish(result: Diagnosis, args: argparse.Namespace, command: Sequence[str]) -> None:
    print(result.text())
    if args.json:
        Path(args.json).write_text(json.dumps(environment(command) | result.data, indent=2) + "\n")
        print(f"\nWritten to {args.json}", file=sys.stderr)
    if args.plot:
        plot.draw(args.plot, result.findings, result.placement, result.title)
        print(f"Drawn in {args.plot}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
