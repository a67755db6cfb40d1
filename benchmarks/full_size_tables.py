"""What the parts of `benchmarks.full_size` have found so far, in one JSON file and one of tables, with the model's
forecast beside each figure. In a dry run's files the name of every figure of speed says that it is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import full_size_plots
from benchmarks.full_size_forecast import FullModel
from benchmarks.full_size_shape import LENGTHS, REPLICATED, SHARDED, Options, shape_of
from engine.bench.report import show

NAME = "full_size"
DRY_RUN = (
    "A DRY RUN: processes on processors, a tiny model, gloo under every dispatcher, a few tokens at each accept "
    "length. It shows that every part runs from end to end; its times and rates say nothing of speed, on any machine. "
    "Forecasts are for the full model on H200s."
)
MODELLED = "Forecasts: docs/dispatch.md#eight-ranks for the rounds, one rank's share on one H200 for the kernels."
SPEEDS = {
    "ms", "spread", "comm us", "tok/s", "plain tok/s", "speedup", "speedup by steps", "best guesses by steps",
    "decode tok/s", "TTFT p50", "ITL p50", "ITL p99",
}  # fmt: skip
PLAIN_MS = {1: 3.6, 8: 7.5}
_MODEL = ("model", "overrides", "dtype")
COMM_US, SPEEDUP, EQUAL = 1000.0, 1.7, 1.02


def write(directory: Path, names: list[str]) -> int:
    """Writes directory/full_size.json and .md, and plots; the exit code."""
    files = {name: directory / f"{name}.json" for name in names}
    results = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    if not results:
        print(f"error: {directory} holds no result of {', '.join(names)}; run some parts first.", file=sys.stderr)
        return 2
    found = summary(results, names)
    drawn = full_size_plots.draw(found, directory)
    found = labelled(found) if found["options"]["dry_run"] else found
    (directory / f"{NAME}.json").write_text(compact(found))
    (directory / f"{NAME}.md").write_text(markdown(found))
    print(f"written: {', '.join([f'{NAME}.json', f'{NAME}.md', *drawn])} in {directory}")
    return 0


def compact(found: dict[str, Any]) -> str:
    """JSON with a row of a table in each line, figures to four digits; the parts' own files have all of them."""

    def value_of(value: Any) -> str:
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"  {json.dumps(_rounded(row))}" for row in value) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(key)}: {value_of(value)}" for key, value in found.items()) + "\n}\n"


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def summary(results: dict[str, dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """results: part -> its file's content, all of the same options. Raises ValueError where they are not."""
    first = next(iter(results.values()))
    if any(result["options"] != first["options"] for result in results.values()):
        raise ValueError("the parts are of different options; use a directory for each.")
    options = Options(**first["options"])
    models = {ep: FullModel(options.tp, ep, options.experts) for ep in options.eps}
    items = {(part, key): item for part, result in results.items() for key, item in result["items"].items()}
    found = {
        "title": f"Full size on {options.tp} ranks",
        "figures": DRY_RUN if options.dry_run else "Measured.",
        "forecasts": MODELLED,
        "options": first["options"],
        "measured with": next(({key: item[key] for key in _MODEL} for item in items.values() if "model" in item), None),
        **{key: first[key] for key in ("date", "device", "versions") if key in first},
        "steps": _steps(options, items, models),
        "prefill": _prefill(options, items, models),
        "eagle3": _eagle3(options, items, models[options.tp]),
        "http": _http(options, items, models[options.tp]),
        "seconds of parts": {part: _seconds(result) for part, result in results.items()},
        "not run": _not_run(results, names),
    }
    return found | {"reach": [] if options.dry_run else _reach(found)}


def labelled(found: dict[str, Any]) -> dict[str, Any]:
    """A dry run's summary, its figures of speed by names that say what they are."""

    def renamed(row: dict[str, Any]) -> dict[str, Any]:
        return {f"{key} (dry run, no speed)" if key in SPEEDS else key: value for key, value in row.items()}

    return {
        key: [renamed(row) for row in value] if key in ("steps", "prefill", "eagle3", "http") else value
        for key, value in found.items()
    }


def _seconds(result: dict[str, Any]) -> float:
    return round(sum(item["item seconds"] for item in result["items"].values()), 1)


def _not_run(results: dict[str, dict[str, Any]], names: list[str]) -> dict[str, str]:
    """Part, or part / item -> why there is nothing of it."""
    found = {name: "was not run" for name in names if name not in results}
    for name, result in results.items():
        for key, item in result["items"].items():
            if reason := item.get("skipped") or item.get("error"):
                found[f"{name} / {key}"] = reason
    return found


def _steps(options: Options, items: dict, models: dict[int, FullModel]) -> list[dict[str, Any]]:
    rows, shape = [], shape_of(options)
    context = 4096 if options.dry_run else shape.context
    for ep, model in models.items():
        for kind, names in (("replicated", REPLICATED), ("sharded", SHARDED)):
            for name in names:
                for row in items.get((f"ep{ep}_{kind}", name), {}).get("rows", ()):
                    rows.append({"ep": ep, "moe_comm": name} | _step(row, name, model, context))
    return rows


def _step(row: dict[str, Any], name: str, model: FullModel, context: int) -> dict[str, Any]:
    size, sent = row["rows"], row["bytes sent"]
    return {
        "T": size,
        "used": row["dispatcher"],
        "ms": row["ms"],
        "forecast ms": model.step_ms(name, size, context),
        "comm us": row["comm us"],
        "forecast comm us": model.comm_us(name, size),
        "rounds": sum(count for kind, count in row["rounds"].items() if sent[kind]),
        "forecast rounds": model.num_rounds(name),
        "MB": sum(sent.values()) / 1e6,
        "forecast MB": None if (sends := model.num_bytes(name, size)) is None else sends / 1e6,
        "spread": row["spread"],
    }


def _prefill(options: Options, items: dict, models: dict[int, FullModel]) -> list[dict[str, Any]]:
    found = []
    for ep, model in models.items():
        for row in items.get((f"ep{ep}_replicated", "prefill"), {}).get("rows", ()):
            found.append({"ep": ep, "step": row["step"], "ms": row["ms"], "tok/s": row["tok/s"]})
            found[-1]["forecast ms at least, of 8192"] = model.prefill_ms
    return found


def _eagle3(options: Options, items: dict, model: FullModel) -> list[dict[str, Any]]:
    found = []
    for batch in shape_of(options).batches:
        plain = items.get(("eagle3", f"no draft, {batch}"), {}).get("row")
        gains = items.get(("eagle3", f"costs, {batch}"), {}).get("gains", {})
        for length in LENGTHS:
            row = items.get(("eagle3", f"accept length {length}, {batch}"), {}).get("row")
            if row is None or plain is None:
                continue
            best = gains.get(str(length), {})
            found.append(
                {
                    "requests": batch,
                    "accept length": length,
                    "tok/s": row["tok/s"],
                    "plain tok/s": plain["tok/s"],
                    "tokens a step": row["tokens a step"],
                    "speedup": row["tok/s"] / plain["tok/s"],
                    "forecast speedup": model.speedup(length) if batch == 1 else None,
                    "best guesses by steps": best.get("guesses"),
                    "speedup by steps": best.get("speedup"),
                    "forecast best": model.best_speedup(length)[1] if batch == 1 else None,
                }
            )
    return found


def _http(options: Options, items: dict, model: FullModel) -> list[dict[str, Any]]:
    full = shape_of(Options(options.device, False, options.tp))
    middle = full.prompt_tokens + full.output_tokens // 2
    keys = ("clients", "decode tok/s", "TTFT p50", "ITL p50", "ITL p99", "errors")
    found = []
    for row in items.get(("http", "clients"), {}).get("rows", ()):
        found.append({key: row[key] for key in keys})
        found[-1]["forecast ITL"] = model.step_ms("auto", row["clients"], middle)
    return found


def _reach(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of what issue and goals want, what was measured."""
    rows = []

    def say(claim: str, wanted: float, measured: float | None, met: bool | None) -> None:
        rows.append({"claim": claim, "wanted": wanted, "measured": measured, "met": met})

    auto = {(row["ep"], row["T"]): row for row in found["steps"] if row["moe_comm"] == "auto"}
    plain = {(row["ep"], row["T"]): row["ms"] for row in found["steps"] if row["moe_comm"] == "allreduce"}
    for size, most in PLAIN_MS.items():
        times = [row["ms"] for (_, rows_), row in auto.items() if rows_ == size]
        least = min(times, default=None)
        say(f"ms of a step, T = {size}, auto, best ep", most, least, None if least is None else least <= most)
    comm = [row["comm us"] for (_, size), row in auto.items() if size == 1]
    say("us of communication, T = 1, auto, every ep", COMM_US, max(comm, default=None), _at_most(comm, COMM_US))
    ratios = [row["ms"] / plain[key] for key, row in auto.items() if key in plain]
    say("auto over allreduce, every size and ep", EQUAL, max(ratios, default=None), _at_most(ratios, EQUAL))
    gains = [row["speedup"] for row in found["eagle3"] if (row["requests"], row["accept length"]) == (1, 3.0)]
    gain = max(gains, default=None)
    say("EAGLE-3 at accept length 3.0 over plain", SPEEDUP, gain, None if gain is None else gain >= SPEEDUP)
    return rows


def _at_most(values: list[float], most: float) -> bool | None:
    return max(values) <= most if values else None


def markdown(found: dict[str, Any]) -> str:
    lines = [f"# {found['title']}", "", found["figures"], "", found["forecasts"], ""]
    for name in ("reach", "steps", "prefill", "eagle3", "http"):
        if found[name]:
            lines += [f"## {name}", "", *_table(found[name]), ""]
    if found["not run"]:
        lines += [
            "## Not run",
            "",
            *(f"- {key}: {' '.join(why.split())[:300]}" for key, why in found["not run"].items()),
        ]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(rows[0])
    cells = (" | ".join(show(row[column]) for column in columns) for row in rows)
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {line} |" for line in cells)]
