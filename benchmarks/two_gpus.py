"""Everything that two GPUs over NCCL must show, in parts of a few minutes each that may be run again to go on.

    python -m benchmarks.two_gpus --list
    python -m benchmarks.two_gpus --parts doctor,latency --out results
    python -m benchmarks.two_gpus --parts soak_ep2,steps_ep2 --device cpu --dry-run --out results   # two gloo processes

A part is a list of items and one file, OUT/PART.json, written after each item. Items that are there are not run again
(--again runs all); those that failed or found no time are. Exit code 0 when every part asked for is complete and
passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.two_gpus_parts import PARTS, Options, Unable
from engine.bench.report import environment

SECONDS = 510.0
LEAST_SECONDS = 15.0  # for one more item


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="python -m benchmarks.two_gpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    main_parser.add_argument("--list", action="store_true", help="the parts and what they show")
    main_parser.add_argument("--part", "--parts", dest="parts", default="", metavar="A,B", help="parts to run")
    main_parser.add_argument("--out", type=Path, default=Path("two_gpus"), metavar="DIR", help="default: %(default)s")
    main_parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    main_parser.add_argument("--dry-run", action="store_true", help="tiny sizes: does the script work?")
    main_parser.add_argument("--again", action="store_true", help="also what is complete")
    main_parser.add_argument("--only", default="", metavar="A,B", help="of dispatchers, these alone")
    main_parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of all parts together; no item begins later (%(default)g)"
    )
    return main_parser


def run_part(name: str, options: Options, args: argparse.Namespace, command: list[str], deadline: float) -> bool:
    """Runs what is missing of a part and says whether it is complete and passed."""
    file = args.out / f"{name}.json"
    result: dict[str, Any] = {"part": name, "complete": False, "items": {}}
    if file.is_file() and not args.again:
        kept = json.loads(file.read_text())
        if kept["options"] != options.as_json():
            raise SystemExit(f"error: {file} is of other options; give --again or another --out.")
        result["items"] = {key: item for key, item in kept["items"].items() if "error" not in item}
        result["complete"] = kept["complete"]
    if not result["complete"]:
        result |= {"about": PARTS[name].about, "options": options.as_json()} | environment(command)
        _run_items(result, name, options, file, deadline)
    passed = result["complete"] and all(item.get("passed", True) for item in result["items"].values())
    if result["complete"] and all("skipped" in item for item in result["items"].values()):
        print(f"{name}: skipped, {'; '.join(item['skipped'] for item in result['items'].values())}")
        return True
    state = "passed" if passed else "complete, but not all passed" if result["complete"] else "not complete"
    print(f"{name}: {state} ({file})")
    return passed


def _run_items(result: dict[str, Any], name: str, options: Options, file: Path, deadline: float) -> None:
    items = result["items"]
    for key, call in PARTS[name].items(options):
        left = deadline - time.monotonic()
        if key in items:
            continue
        if left < LEAST_SECONDS:
            print(f"{name} / {key}: no time left; run the part again")
            break
        started = time.monotonic()
        items[key] = _outcome(call, items, left)
        items[key]["item seconds"] = round(time.monotonic() - started, 1)
        print(f"{name} / {key}: {_one_line(items[key])}", flush=True)
        _write(file, result)
    wanted = [key for key, _ in PARTS[name].items(options)]
    result["complete"] = all(key in items and "error" not in items[key] for key in wanted)
    _write(file, result)


def _outcome(call, items: dict[str, Any], seconds: float) -> dict[str, Any]:
    """An item that fails does not keep the others from running: its reason is its result, and it runs again."""
    try:
        return call(items, seconds)
    except Unable as reason:
        return {"skipped": str(reason)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _write(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


def _one_line(item: dict[str, Any]) -> str:
    for key in ("error", "skipped"):
        if key in item:
            return f"{key}: {' '.join(item[key].split())[-600:]}"
    return "" if "passed" not in item else "passed" if item["passed"] else "NOT PASSED"


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    args = parser().parse_args(arguments)
    names = [name for name in args.parts.split(",") if name]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"error: no part is called {unknown[0]!r}; use {', '.join(PARTS)}.", file=sys.stderr)
        return 2
    if args.list or not names:
        for name, part in PARTS.items():
            print(f"{name:18} {part.about}")
        return 0
    options = Options(args.device, args.dry_run, tuple(name for name in args.only.split(",") if name))
    deadline = time.monotonic() + args.seconds
    command = ["python", "-m", "benchmarks.two_gpus", *arguments]
    passed = [run_part(name, options, args, command, deadline) for name in names]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
