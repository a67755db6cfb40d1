"""`python -m engine.bench SUBCOMMAND [--json FILE]`.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> Report`, and one line in SUBCOMMANDS. Of
several processes that torchrun started one has a Report, the others None.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.bench.report import MeasurementError, publish
from engine.config import ConfigError

SUBCOMMANDS = {
    "step": ("engine.bench.step", "decode steps and prefill of one rank's share, against the byte roofline"),
    "chunks": ("engine.bench.chunks", "steps with a part of a prompt on one rank's share, at once and replayed"),
    "moe": ("engine.bench.moe", "the routed experts of a layer on one rank"),
    "mla": ("engine.bench.mla", "attention of a layer on one rank"),
    "dense": ("engine.bench.dense", "the dense products of a layer on one rank"),
    "comm": ("engine.bench.comm", "rounds between ranks: collectives and dispatchers"),
    "spec": ("engine.bench.spec", "speculation: accept lengths, and decoding with and without"),
    "serve": ("engine.bench.serve", "the engine under load: HTTP against in process, prefix cache against none"),
    "longest_step": ("engine.bench.longest_step", "streams beside the prefill of a long prompt, steps bounded or not"),
    "load": ("engine.bench.load", "loading a checkpoint, against the disk and a loop of safe_open"),
    "host": ("engine.bench.host", "the work of the host for a decode step, and for an event over HTTP"),
    "cpu": ("engine.bench.cpu", "decoding against transformers' generate on the CPU, float32"),
}


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(prog="python -m engine.bench", description="Measurements of the engine.")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="SUBCOMMAND")
    for name, (module, description) in SUBCOMMANDS.items():
        sub = commands.add_parser(name, help=description, description=description)
        sub.add_argument("--json", metavar="FILE", help="write the result there too, for scripts")
        importlib.import_module(module).add_arguments(sub)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    module = importlib.import_module(SUBCOMMANDS[args.command][0])
    try:
        if args.json and not Path(args.json).absolute().parent.is_dir():
            raise ConfigError(f"--json {args.json}: its folder does not exist; make it first.")
        report = module.run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MeasurementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if report is None:
        return 0
    publish(report, ["python", "-m", "engine.bench", *arguments], args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
