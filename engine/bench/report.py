"""What every measurement shares: facts about the machine, interleaved arms, medians, a table for people, a JSON file.

Knows nothing about what is measured.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.config import FULL_CONFIG, TINY_CHECKPOINT

PACKAGES = ("turnout", "torch", "triton", "transformers", "safetensors", "numpy")


def environment(command: Sequence[str]) -> dict[str, Any]:
    """The command line, versions, device, date and load of this run, ready for JSON."""
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_name() -> str:
    """The GPUs where there are any, the processor's own name otherwise."""
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Summary:
    """Median of the samples and their spread, (largest - smallest) / median."""

    median: float
    spread: float
    samples: list[float]


def summarise(samples: Sequence[float]) -> Summary:
    """Raises ValueError for no samples, or for a sample that is not above zero."""
    if not samples or min(samples) <= 0:
        raise ValueError(f"a summary needs samples above zero, not {list(samples)}.")
    median = statistics.median(samples)
    return Summary(median, (max(samples) - min(samples)) / median, list(samples))


def interleave(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, Summary]:
    """Runs every arm once a round, the order turned round each time, so that drift of the machine hits all arms alike.

    An arm returns its own sample, for example tokens per second. Warm-up is the caller's.
    """
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in list(arms) if number % 2 == 0 else reversed(list(arms)):
            samples[name].append(arms[name]())
    return {name: summarise(values) for name, values in samples.items()}


class MeasurementError(RuntimeError):
    """Nothing could be measured; the message says why."""


@dataclass
class Report:
    """The result of one subcommand: `rows` of one table (equal keys), sentences below it, and data for JSON alone."""

    title: str
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


def show(value: Any) -> str:
    """A cell: three significant digits for fractions, yes and no for truth, a dash for nothing."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def format_table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns under their names; numbers to the right, words to the left."""
    if not rows:
        return "(nothing measured)"
    columns = list(rows[0])
    cells = [[show(row[c]) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    right = [all(isinstance(row[c], int | float) or row[c] is None for row in rows) for c in columns]

    def line(texts: Sequence[str]) -> str:
        padded = (t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def publish(report: Report, command: Sequence[str], json_file: str | None) -> None:
    """Prints the report for people and, where a file is named, writes it for scripts."""
    facts = environment(command)
    versions = facts["versions"]
    print(report.title)
    print(f"{facts['device']}, {facts['cpus']} CPUs, {facts['threads']} threads; torch {versions['torch']}, ", end="")
    print(f"transformers {versions['transformers']}; {facts['date']}\n")
    print(format_table(report.rows))
    for note in report.notes:
        print(note)
    if json_file:
        content = {"title": report.title, **facts, "rows": report.rows, "notes": report.notes, **report.data}
        Path(json_file).write_text(json.dumps(content, indent=2) + "\n")
        print(f"\nWritten to {json_file}", file=sys.stderr)


def model_name(model: str) -> str:
    """A checkpoint as a result file names it: a bundled one by its place in the project, others by their folder."""
    path = Path(model).resolve()
    return f"models/kimi_k25/{path.name}" if path in (TINY_CHECKPOINT, FULL_CONFIG) else path.name
