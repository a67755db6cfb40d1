"""What the arms of `engine.bench serve` did under each load, side by side."""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

from engine.bench.serve_options import BASELINE
from engine.bench.serve_stats import Record

GOALS = {1: (0.98, 0.995), 8: (0.98, 0.995), 64: (0.97, 0.995)}  # clients -> HTTP over in process, goal and stretch
TTFT_GOAL_MS = 3.0
CACHE_GOAL = 5.0
_SHOWN = ("tok/s", "decode tok/s", "req/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p50 s", "good", "cached")


@dataclass
class Sample:
    """One arm's run of one point's load in one round."""

    figures: dict[str, Any]
    records: list[Record]


@dataclass
class Point:
    """A load's setting and what its arms did, round by round."""

    args: argparse.Namespace
    name: str
    concurrency: int | None
    rate: float | None
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def median(self, arm: str, figure: str) -> float | None:
        values = [sample.figures[figure] for sample in self.samples[arm]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def paired(self, arm: str, other: str, figure: str) -> list[tuple[float, float]]:
        """The figure in both arms, of each round in which both have it."""
        pairs = zip(self.samples[arm], self.samples[other], strict=True)
        both = [(one.figures[figure], two.figures[figure]) for one, two in pairs]
        return [pair for pair in both if None not in pair]

    def row(self, arm: str) -> dict[str, Any]:
        figures = [sample.figures for sample in self.samples[arm]]
        rates = [f["tok/s"] for f in figures if f["tok/s"]]
        row: dict[str, Any] = {"load": self.name, "arm": arm, "requests": figures[0]["requests"]}
        row |= {name: self.median(arm, name) for name in _SHOWN}
        row["spread"] = (max(rates) - min(rates)) / statistics.median(rates) if rates else None
        return row | {name: sum(f[name] for f in figures) for name in ("preempted", "429", "errors")}


def ratio_rows(points: list[Point]) -> list[dict[str, Any]]:
    """HTTP over in process, paired by round: medians."""
    rows = []
    for point in points:
        if not {"in-process", "http"} <= point.samples.keys():
            continue
        goal, stretch = GOALS.get(point.concurrency, (None, None))
        whole = [http / inside for http, inside in point.paired("http", "in-process", "tok/s")]
        decode = [http / inside for http, inside in point.paired("http", "in-process", "decode tok/s")]
        added = [http - inside for http, inside in point.paired("http", "in-process", "TTFT p50")]
        rows.append(
            {
                "load": point.name,
                "HTTP / in process": statistics.median(whole),
                "lowest": min(whole),
                "highest": max(whole),
                "while all decode": statistics.median(decode) if decode else None,
                "goal": goal,
                "stretch": stretch,
                "added TTFT ms": statistics.median(added),
                "goal ms": TTFT_GOAL_MS,
            }
        )
    return rows


def cache_rows(points: list[Point]) -> list[dict[str, Any]]:
    """Without the prefix cache over with it, paired by round: medians."""
    rows = []
    for point in points:
        for arm in point.samples:
            if arm + BASELINE not in point.samples:
                continue
            times = point.paired(arm + BASELINE, arm, "TTFT p50")
            rows.append(
                {
                    "load": point.name,
                    "arm": arm,
                    "TTFT p50 uncached ms": statistics.median(without for without, _ in times),
                    "cached ms": statistics.median(cached for _, cached in times),
                    "times lower": statistics.median(without / cached for without, cached in times),
                    "goal": CACHE_GOAL,
                    "tok/s, times higher": statistics.median(
                        cached / without for without, cached in point.paired(arm + BASELINE, arm, "tok/s")
                    ),
                }
            )
    return rows
