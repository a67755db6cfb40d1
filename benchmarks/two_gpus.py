"""Everything that two GPUs over NCCL must show, in parts of a few minutes each that may be run again to go on.

    python -m benchmarks.two_gpus --list
    python -m benchmarks.two_gpus --parts comm,steps_ep1 --out results
    python -m benchmarks.plots results --out benchmarks/two_gpus   # the table of what is to be reached, and charts
    python -m benchmarks.two_gpus --parts soak_ep2,steps_ep2 --device cpu --dry-run --out results   # two gloo processes

How parts and items run, and what is kept of them: benchmarks/parts.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import parts
from benchmarks.two_gpus_parts import CALLS, PARTS, Options


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_gpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts.add_arguments(main_parser, "two_gpus")
    main_parser.add_argument("--only", default="", metavar="A,B", help="of dispatchers, these alone")
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    options = Options(args.device, args.dry_run, tuple(name for name in args.only.split(",") if name))
    code = parts.run(PARTS, options, args, ["python", "-m", "benchmarks.two_gpus", *arguments])
    if args.list or not args.parts:
        print(f"\nAll in one session, {sum(PARTS[name].seconds for call in CALLS for name in call):g} s expected:")
        for call in CALLS:
            words = f"--parts {','.join(call)} --out {args.out}"
            print(f"  python -m benchmarks.two_gpus {words}  # {sum(PARTS[name].seconds for name in call):g} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
