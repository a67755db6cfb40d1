"""Measurements in parts that may be run again to go on.

A part is a list of items and one file, OUT/PART.json, written after each item. An item is called with the results of
those before it and the seconds that are left, and returns a result for JSON. Items that are there are not run again
(--again runs all); those that failed or found no time are. Exit code 0 when every part asked for is complete and
passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.ranks import ROOT, environment
from engine.bench import report

SECONDS = 510.0
LEAST_SECONDS = 15.0  # for one more item
Item = Callable[[dict[str, Any], float], dict[str, Any]]
Items = Iterator[tuple[str, Item]]


class Unable(Exception):
    """Why an item cannot run here: no failure, and nothing that another try would change."""


class Options(Protocol):
    """What a part's items are told; results of other options are not mixed with theirs."""

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Part:
    """seconds: that it is expected to take; 0 where nobody said."""

    about: str
    items: Callable[[Any], Items]
    seconds: float = 0.0


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """The arguments that `run` reads, and `--device` and `--dry-run`, which options are made from."""
    parser.add_argument("--list", action="store_true", help="the parts and what they show")
    parser.add_argument("--part", "--parts", dest="parts", default="", metavar="A,B", help="parts to run")
    parser.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes: does the script work?")
    parser.add_argument("--again", action="store_true", help="also what is complete")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of all parts together; no item begins later (%(default)g)"
    )


def run(parts: dict[str, Part], options: Options, args: argparse.Namespace, command: list[str]) -> int:
    """Lists `parts`, or runs those asked for; the exit code. command: as it was typed, for the files."""
    names = [name for name in args.parts.split(",") if name]
    unknown = [name for name in names if name not in parts]
    if unknown:
        print(f"error: no part is called {unknown[0]!r}; use {', '.join(parts)}.", file=sys.stderr)
        return 2
    if args.list or not names:
        for name, part in parts.items():
            expected = f"{part.seconds:4.0f} s  " if part.seconds else ""
            print(f"{name:18} {expected}{part.about}")
        return 0
    deadline = time.monotonic() + args.seconds
    passed = [_run_part(name, parts[name], options, args, command, deadline) for name in names]
    return 0 if all(passed) else 1


def _run_part(
    name: str, part: Part, options: Options, args: argparse.Namespace, command: list[str], deadline: float
) -> bool:
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
        result |= {"about": part.about, "options": options.as_json()} | report.environment(command)
        _run_items(result, name, part, options, file, deadline)
    passed = result["complete"] and all(item.get("passed", True) for item in result["items"].values())
    if result["complete"] and all("skipped" in item for item in result["items"].values()):
        print(f"{name}: skipped, {'; '.join(item['skipped'] for item in result['items'].values())}")
        return True
    state = "passed" if passed else "complete, but not all passed" if result["complete"] else "not complete"
    print(f"{name}: {state} ({file})")
    return passed


def _run_items(result: dict[str, Any], name: str, part: Part, options: Options, file: Path, deadline: float) -> None:
    items = result["items"]
    with ExitStack() as stack:
        listed = part.items(options)
        if isinstance(listed, Generator):  # it may hold what its items share
            stack.callback(listed.close)
        for key, call in listed:
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
    wanted = [key for key, _ in part.items(options)]
    result["complete"] = all(key in items and "error" not in items[key] for key in wanted)
    _write(file, result)


def _outcome(call: Item, items: dict[str, Any], seconds: float) -> dict[str, Any]:
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


def program(module: str, arguments: Callable[[Any], list[str]]) -> Callable[[Any], Items]:
    """One item: a program of the project that writes JSON."""

    def items(options: Any) -> Items:
        def call(_: dict, seconds: float) -> dict[str, Any]:
            if importlib.util.find_spec(module) is None:
                raise RuntimeError(f"{module} is not there yet.")
            with tempfile.TemporaryDirectory() as directory:
                file = Path(directory) / "result.json"
                command = [sys.executable, "-m", module, *arguments(options), "--json", str(file)]
                done = subprocess.run(
                    command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds
                )
                result = json.loads(file.read_text()) if file.is_file() else None
            if result is None:
                raise RuntimeError(f"{module} wrote nothing:\n{done.stdout[-1000:]}\n{done.stderr[-1000:]}")
            return {"passed": done.returncode == 0, "exit code": done.returncode, "result": result}

        yield module, call

    return items
