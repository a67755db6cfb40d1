"""What two GPUs are to reach, and what the files of `benchmarks.two_gpus` say was reached."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = {  # part -> a file of the project with figures of it, for where the part has not run
    "comm": "comm_2xh200.json",
    "drills": "drills_2xh200.json",
    "steps_ep1": "steps_2xh200_ep1.json",
    "steps_ep2": "steps_2xh200_ep2.json",
}
POINTS = ("1 @ 4096", "8 @ 4096", "64 @ 2048")
STEP_GOALS = {"1 @ 4096": (6.3, 5.0), "8 @ 4096": (16.0, 13.5), "64 @ 2048": (31.5, 28.0)}  # ms: goal, stretch; G6
STEP_VLLM = {"1 @ 4096": "10.5", "8 @ 4096": "20.6", "64 @ 2048": "41.1"}
EP_GOALS = {"1 @ 4096": (1.07, 1.03), "8 @ 4096": (1.05, 1.02), "64 @ 2048": (1.00, 0.98)}
EP_VLLM = {"1 @ 4096": "1.055", "8 @ 4096": "1.05", "64 @ 2048": "1.00"}
SPEEDUPS = {2.0: (1.10, 1.3), 2.5: (1.40, 1.6), 3.0: (1.65, 1.95)}  # accept length -> goal, stretch; G5
HTTP_GOALS = {1: (0.98, 0.995), 8: (0.98, 0.995), 64: (0.97, 0.995)}  # clients -> goal, stretch; G8
FEW_ROWS = 8
HANGS = ("kill", "stop", "loop")


@dataclass(frozen=True)
class Reach:
    """A row: what is compared, its figure (None: not run), and the figures wanted. note: what it was measured with."""

    what: str
    measured: float | None
    goal: float
    stretch: float | None
    part: str
    note: str = ""
    more_is_better: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not run"
        if self._reaches(self.goal):
            return "met, stretch too" if self.stretch is not None and self._reaches(self.stretch) else "met"
        if self.goal == 0:
            return f"missed: {self.measured:g}"
        percent = 100 * abs(self.measured / self.goal - 1)
        return f"missed by {percent:.1f} %" if percent >= 1 else f"missed by {percent:.2g} %"

    def _reaches(self, wanted: float) -> bool:
        return self.measured >= wanted if self.more_is_better else self.measured <= wanted


class Results:
    """The part files of a folder; `known` is where older ones of the project lie, None for none of them."""

    def __init__(self, folder: Path, known: Path | None = None):
        self._files: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, str] = {}
        for file in sorted(folder.glob("*.json")):
            content = json.loads(file.read_text())
            if isinstance(content, dict) and content.get("part") == file.stem:
                self._files[file.stem], self.sources[file.stem] = content, file.name
        for part, name in KNOWN.items() if known is not None else ():
            if part not in self._files and (known / name).is_file():
                self._files[part] = _as_part(part, json.loads((known / name).read_text()))
                self.sources[part] = name

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        return dict(self._files)

    def is_dry(self) -> bool:
        options = [file.get("options", {}) for file in self._files.values()]
        return any(one.get("dry_run") or one.get("device") == "cpu" for one in options)

    def items(self, part: str) -> dict[str, Any]:
        """Those that have a result."""
        items = self._files.get(part, {}).get("items", {})
        return {key: item for key, item in items.items() if not {"error", "skipped"} & item.keys()}

    def comm_rows(self) -> dict[int, dict[str, Any]]:
        report = self.items("comm").get("engine.bench", {}).get("result", {})
        return {row["T"]: row for row in report.get("rows", ())}

    def steps(self, ep: int) -> dict[str, dict[str, dict[str, Any]]]:
        """Dispatcher -> "batch @ context" -> row."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for key, item in self.items(f"steps_ep{ep}").items():
            rows = item.get("rows", {})
            for name, measured in rows.items() if isinstance(rows, dict) else [(key, rows)]:  # older files: by name
                found[name] = {row["step"].removeprefix("decode "): row for row in measured}
        return found

    def hidden(self, ep: int) -> dict[str, dict[str, dict[str, float | None]]]:
        """Dispatcher -> "batch @ context" -> the share of its rounds that is hidden."""
        return self.items(f"steps_ep{ep}").get("hidden", {}).get("hidden", {})


def _as_part(part: str, content: dict[str, Any]) -> dict[str, Any]:
    """A file that a program has written by itself, in the form of a part's."""
    facts = {"part": part} | {key: content[key] for key in ("device", "date", "command", "versions") if key in content}
    if part == "comm":
        return facts | {"items": {"engine.bench": {"result": content}}}
    if part == "drills":
        return facts | {"items": {f"{one['start']} {one['fault']}": {"result": [one]} for one in content["drills"]}}
    return content


def rows(results: Results) -> list[Reach]:
    """The table of what two GPUs are to reach, in its order, then what else they are to show."""
    return [*_rounds(results), *_steps(results), *_auto(results), *_faults(results), *_others(results)]


def _most(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _rounds(results: Results) -> list[Reach]:
    by_rows = results.comm_rows()

    def worst(column: str, most: int, least: int = 1) -> float | None:
        return _most(row.get(column) for t, row in by_rows.items() if least <= t <= most)

    fused = "fused reduce + residual + RMSNorm over NCCL all-reduce + two kernels"
    hidden = results.hidden(1)
    name = next((n for n in ("auto", "symm_replicated", "symm_scatter") if n in hidden), None)
    first = hidden[name].get(POINTS[0], {}) if name else {}
    note = f"`{name}`, TP2, 1 @ 4096; net of the norms' own time {_shown(first.get('net'))}" if first else ""
    return [
        Reach(f"{fused}, T = 1..8", worst("G4", FEW_ROWS), 0.45, 0.30, "comm", "worst T"),
        Reach(f"{fused}, T = 128", worst("G4", 128, 128), 0.75, 0.60, "comm"),
        Reach(
            "dispatch + combine (`symm_sharded`) over one NCCL all-reduce, T = 1..128",
            worst("G4b", 128), 1.0, 0.6, "comm", "worst T",
        ),
        Reach(
            "communication hidden under weight reads", first.get("hidden"), 0.4, 0.8, "steps_ep1", note,
            more_is_better=True,
        ),
    ]  # fmt: skip


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def _best(steps: dict[str, dict[str, dict[str, Any]]], point: str) -> tuple[str, float] | None:
    """What an engine left to itself takes, or the fastest where that was not measured."""
    times = {name: by_point[point]["ms"] for name, by_point in steps.items() if point in by_point and name != "silent"}
    if not times:
        return None
    name = "auto" if "auto" in times else min(times, key=times.get)
    return name, times[name]


def _steps(results: Results) -> list[Reach]:
    sliced, whole = results.steps(1), results.steps(2)
    found = []
    for point, (goal, stretch) in STEP_GOALS.items():
        best = _best(sliced, point)
        note = f"`{best[0]}`; vLLM 0.26: {STEP_VLLM[point]}" if best else f"vLLM 0.26: {STEP_VLLM[point]}"
        found.append(Reach(f"TP2 step, {point}, ms", best and best[1], goal, stretch, "steps_ep1", note))
    for point, (goal, stretch) in EP_GOALS.items():
        tp2, ep2 = _best(sliced, point), _best(whole, point)
        ratio = ep2[1] / tp2[1] if tp2 and ep2 else None
        note = f"vLLM 0.26: {EP_VLLM[point]}"
        note = f"`{ep2[0]}` {ep2[1]:.2f} ms over `{tp2[0]}` {tp2[1]:.2f} ms; {note}" if ratio else note
        found.append(Reach(f"EP2 step over TP2 step, {point}", ratio, goal, stretch, "steps_ep2", note))
    return found


def auto_over_allreduce(results: Results) -> dict[tuple[int, str], float]:
    """(ep, "batch @ context") -> ratio of two steps of one run."""
    ratios = {}
    for ep in (1, 2):
        steps = results.steps(ep)
        for point, row in steps.get("auto", {}).items():
            if point in steps.get("allreduce", {}):
                ratios[ep, point] = row["ms"] / steps["allreduce"][point]["ms"]
    return ratios


def _auto(results: Results) -> list[Reach]:
    ratios = auto_over_allreduce(results)
    few = [ratio for (_, point), ratio in ratios.items() if int(point.split(" @ ")[0]) <= FEW_ROWS]
    return [
        Reach("step with `auto` over `allreduce`, any T", _most(ratios.values()), 1.01, None, "steps_ep1", "worst T"),
        Reach("step with `auto` over `allreduce`, T <= 8", _most(few), 1.01, 0.8, "steps_ep1", "worst T"),
    ]


def _faults(results: Results) -> list[Reach]:
    outcomes = [one for item in results.items("drills").values() for one in item["result"]]
    hangs = [one for one in outcomes if one["fault"] in HANGS]
    without = sum(1 for one in outcomes if one["left"] or one["reason"] is None)
    note = f"slowest of {len(hangs)}" + (f"; {without} left a process or gave no reason" if without else "")
    return [
        Reach("a killed or hung rank: all out, s", _most(one["ended"] for one in hangs), 30, 10, "drills", note),
    ]


def _others(results: Results) -> list[Reach]:
    found = [*_speculation(results), *_http(results)]
    for part in ("tokens_float32", "tokens_bfloat16_ep2", "tokens_bfloat16_ep1"):
        compared = results.items(part).get("comparison")
        wrong = None if compared is None else _different(compared)
        note = f"{compared['compared']} answers of {len(results.items(part))} items" if compared else ""
        found.append(Reach(f"{part}: answers that differ", wrong, 0, None, part, note))
    for part in ("soak_ep2", "soak_ep1"):
        ranks = {name: item["ranks"] for name, item in results.items(part).items() if "ranks" in item}
        bad = sum(r["wrong"] + r["looks_with_unequal_bits"] for one in ranks.values() for r in one) if ranks else None
        note = f"{sum(one[0]['replays'] for one in ranks.values()):,} replays of {len(ranks)} dispatchers"
        found.append(Reach(f"{part}: replays that were wrong", bad, 0, None, part, note if ranks else ""))
    return found


def _speculation(results: Results) -> list[Reach]:
    """One request with sliced experts; with whole ones and more requests: the part's file."""
    engine = results.items("eagle3").get("ep1", {}).get("engine", ())
    by_length = {row["accept length"]: row for row in engine if row["batch"] == 1}
    found = []
    for length, goals in SPEEDUPS.items():
        row, what = by_length.get(length), f"tok/s over plain decoding at accept length {length:g}, TP2, 1 request"
        note = f"{row['tok/s']:.0f} tok/s, {row['tokens a step']:.2f} tokens a step" if row else ""
        found.append(Reach(what, row and row["speedup"], *goals, "eagle3", note, more_is_better=True))
    return found


def _http(results: Results) -> list[Reach]:
    item = results.items("http").get("http ep1", {}).get("result", {})
    by_load = {row["load"]: row for row in item.get("http_over_in_process", ())}
    found = []
    for clients, goals in HTTP_GOALS.items():
        row = by_load.get(f"http, {clients} client{'s' * (clients > 1)}")
        note = f"added to the first token: {row['added TTFT ms']:.1f} ms" if row else ""
        what = f"tok/s over HTTP over in process, TP2, {clients} at a time"
        found.append(Reach(what, row and row["HTTP / in process"], *goals, "http", note, more_is_better=True))
    return found


def _different(compared: dict[str, Any]) -> int:
    if "different" in compared:
        return len(compared["different"])
    return len(compared["different_within_a_family"]) + compared["partings_too_wide"]
