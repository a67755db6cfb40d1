"""From the files of `benchmarks.two_gpus`: one summary, the table of what is to be reached, and charts.

    python -m benchmarks.plots results --out results/two_gpus      # two_gpus.json, .md and charts beside them
    python -m benchmarks.plots results                             # prints the table alone

A part that has not run is "not run", or with --known taken from an older file of the project, which the table names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.svg_chart import line_chart
from benchmarks.two_gpus_reach import Results, auto_over_allreduce, rows
from engine.comm.dispatcher import DISPATCHERS

HERE = Path(__file__).resolve().parent
DRY = "A dry run on processors: it shows that the scripts work, and nothing of GPUs."


def table(results: Results) -> str:
    """Markdown."""
    lines = [DRY, ""] if results.is_dry() else []
    lines += ["| | measured | goal | stretch | | measured with | from |", "|---|---|---|---|---|---|---|"]
    for row in rows(results):
        sign = ">=" if row.more_is_better else "<="
        stretch = "" if row.stretch is None else f"{sign} {row.stretch:g}"
        measured = "" if row.measured is None else f"{row.measured:.4g}"
        source = results.sources.get(row.part, f"part {row.part}")
        cells = [row.what, measured, f"{sign} {row.goal:g}", stretch, row.verdict, row.note, source]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *(_origin(name, file) for name, file in zip(results.sources.values(), results.parts.values(), strict=True)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _origin(name: str, file: dict[str, Any]) -> str:
    torch = file.get("versions", {}).get("torch", "unknown")
    return f"- {name}: {file.get('device', 'unknown device')}, torch {torch}, {file.get('date', 'unknown date')}"


def summary(results: Results) -> dict[str, Any]:
    """All figures of the table, what each part was run with, and the items that failed or were left out."""
    parts = {}
    for name, file in results.parts.items():
        kept = ("about", "complete", "command", "date", "device", "versions", "options")
        items = file["items"]
        parts[name] = {key: file[key] for key in kept if key in file} | {
            "file": results.sources[name],
            "seconds": sum(item.get("item seconds", 0.0) for item in items.values()),
            "not passed": [key for key, item in items.items() if item.get("passed") is False],
            "failed": {key: item["error"] for key, item in items.items() if "error" in item},
            "left out": {key: item["skipped"] for key, item in items.items() if "skipped" in item},
        }
    auto = [{"ep": ep, "step": point, "ratio": ratio} for (ep, point), ratio in auto_over_allreduce(results).items()]
    return {
        "dry run": results.is_dry(),
        "reach": [asdict(row) | {"verdict": row.verdict} for row in rows(results)],
        "auto over allreduce": auto,
        "hidden": {f"ep{ep}": results.hidden(ep) for ep in (1, 2)},
        "backends": results.items("backends"),
        "parts": parts,
    }


def charts(results: Results) -> dict[str, str]:
    """File name -> SVG, of what there are figures of."""
    made = {"rounds": _rounds(results), "steps": _steps(results), "eagle3": _eagle3(results)}
    return {name: chart for name, chart in made.items() if chart is not None}


def _rounds(results: Results) -> str | None:
    by_rows = results.comm_rows()
    names = ("all-reduce", "all-reduce, sum, norm", *DISPATCHERS)
    series = {name: [(t, row[name]) for t, row in by_rows.items() if row.get(name)] for name in names}
    series = {name: points for name, points in series.items() if points}
    if not series:
        return None
    return line_chart("A layer's rounds between two ranks", series, "rows", "us", y_base=10)


def _steps(results: Results) -> str | None:
    """Against `allreduce` of the same weights, so that few and many rows are on one scale."""
    series = {}
    for ep in (1, 2):
        steps = results.steps(ep)
        base = steps.get("allreduce", {})
        for name, by_point in steps.items():
            points = [(int(p.split()[0]), row["ms"] / base[p]["ms"]) for p, row in by_point.items() if p in base]
            if points and name != "allreduce":
                series[f"ep={ep} {name}"] = points
    return line_chart("Step over the step with allreduce", series, "requests", "ratio") if series else None


def _eagle3(results: Results) -> str | None:
    series: dict[str, list[tuple[float, float]]] = {}
    for ep, item in results.items("eagle3").items():
        for row in item["engine"]:
            if row["accept length"] != "no draft":
                name = f"{ep} {row['batch']} @ {row['context']}"
                series.setdefault(name, []).append((row["accept length"], row["speedup"]))
    if not series:
        return None
    return line_chart("Decoding with a draft over plain", series, "accept length", "tok/s ratio", x_base=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the part files lie")
    parser.add_argument("--out", type=Path, metavar="NAME", help="writes NAME.json, NAME.md and NAME_*.svg")
    parser.add_argument("--known", action="store_true", help="older figures of the project where a part has not run")
    args = parser.parse_args(arguments)
    if not args.folder.is_dir():
        print(f"error: {args.folder} is no folder; give the --out of benchmarks.two_gpus.", file=sys.stderr)
        return 2
    results = Results(args.folder, HERE if args.known else None)
    text = table(results)
    print(text, end="")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        _beside(args.out, ".json").write_text(json.dumps(summary(results), indent=1) + "\n")
        _beside(args.out, ".md").write_text(text)
        for name, chart in charts(results).items():
            _beside(args.out, f"_{name}.svg").write_text(chart)
    return 0


def _beside(out: Path, ending: str) -> Path:
    return out.with_name(out.name + ending)


if __name__ == "__main__":
    sys.exit(main())
