"""The full model on 8 GPUs, in parts of under 9 minutes each that may be run again to go on.

    python -m benchmarks.full_size --list
    python -m benchmarks.full_size --parts doctor,ep8_replicated --out results
    python -m benchmarks.full_size --all --out results              # every part that is not complete
    python -m benchmarks.full_size --tables --out results           # of what is there: JSON, Markdown and plots
    python -m benchmarks.full_size --all --device cpu --dry-run --out results   # eight gloo processes, a tiny model

Weights are made up from a seed, made once in a part and used for all that it measures. A rank that dies ends the item
it died in, with its reason; the items after it begin anew. How parts and items run: benchmarks/parts.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import full_size_tables, parts
from benchmarks.full_size_parts import parts_of
from benchmarks.full_size_shape import Options


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="python -m benchmarks.full_size", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts.add_arguments(main_parser, "full_size")
    main_parser.add_argument("--all", action="store_true", help="every part, each with --seconds of its own")
    main_parser.add_argument("--tables", action="store_true", help="write OUT/full_size.json, .md and plots")
    main_parser.add_argument("--tp", type=int, choices=(2, 4, 8), default=8, help="ranks (default %(default)s)")
    main_parser.add_argument("--experts", type=int, help="routed experts of a layer (default all; 192 fit four H200)")
    main_parser.add_argument("--gpu-memory-gb", type=float, metavar="GIB", help="reckon with GPUs of such memory")
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    options = Options(args.device, args.dry_run, args.tp, args.experts, args.gpu_memory_gb)
    known = parts_of(args.tp)
    if args.tables:
        return full_size_tables.write(args.out, list(known))
    runs = (args.all or args.parts) and not args.list
    if runs and args.device == "cuda" and torch.cuda.device_count() < args.tp:
        count = torch.cuda.device_count()
        print(f"error: --tp {args.tp} needs {args.tp} GPUs, this host has {count}; use --device cpu.", file=sys.stderr)
        return 2
    command = ["python", "-m", "benchmarks.full_size", *arguments]
    if not args.all or args.list:
        return parts.run(known, options, args, command)
    codes = [parts.run({name: part}, options, _only(args, name), command) for name, part in known.items()]
    return max(codes)


def _only(args: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | {"parts": name})


if __name__ == "__main__":
    sys.exit(main())
