"""Plots of `benchmarks.full_size` as SVG, which needs no library: steps and communication over rows, a panel for each
ep, and what a draft gains over accept lengths. Forecasts are dashed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 340, 330, 62, 64, 48, 24
_LEGEND = 150


@dataclass(frozen=True)
class Curve:
    """points: (x, y), all above zero. number: of its colour."""

    label: str
    number: int
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    curves: Sequence[Curve]


def draw(found: dict[str, Any], directory: Path) -> list[str]:
    """found: of `full_size_tables.summary`. The names of the files written."""
    where = "DRY RUN, its times say nothing" if found["options"]["dry_run"] else found.get("device", "")
    plots = {}
    if found["steps"]:
        for column, label in (("ms", "ms a step"), ("comm us", "us of communication a step")):
            panels = [_over_rows(found["steps"], ep, column) for ep in _distinct(found["steps"], "ep")]
            plots[f"full_size_{column.replace(' ', '_')}.svg"] = svg(panels, f"{label}; {where}", "T, rows of a step")
    if found["eagle3"]:
        title = f"rate with a draft over plain; {where}"
        plots["full_size_eagle3.svg"] = svg([_gains(found["eagle3"])], title, "accept length, forced")
    for name, text in plots.items():
        (directory / name).write_text(text)
    return list(plots)


def _distinct(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _over_rows(rows: list[dict[str, Any]], ep: int, column: str) -> Panel:
    curves = []
    for number, name in enumerate(_distinct(rows, "moe_comm")):
        mine = [row for row in rows if (row["ep"], row["moe_comm"]) == (ep, name)]
        curves += _pair(name, number, mine, "T", column)
    return Panel(f"ep {ep}", curves)


def _gains(rows: list[dict[str, Any]]) -> Panel:
    curves = []
    for number, batch in enumerate(_distinct(rows, "requests")):
        mine = [row for row in rows if row["requests"] == batch]
        curves += _pair(f"requests: {batch}", number, mine, "accept length", "speedup")
    return Panel("", curves)


def _pair(label: str, number: int, rows: list[dict[str, Any]], x: str, y: str) -> list[Curve]:
    """What was measured, and its forecast."""
    measured, forecast = ([(row[x], row[key]) for row in rows if row[key]] for key in (y, f"forecast {y}"))
    pair = [Curve(label, number, measured), Curve(f"{label}, forecast", number, forecast, True)]
    return [curve for curve in pair if curve.points]


def svg(panels: Sequence[Panel], title: str, x_label: str) -> str:
    """Panels side by side over the same logarithmic axes. Raises ValueError where no curve has a point."""
    points = [point for panel in panels for curve in panel.curves for point in curve.points]
    if not points:
        raise ValueError("there is nothing to draw.")
    ys = ticks(min(y for _, y in points), max(y for _, y in points))
    xs = sorted({x for x, _ in points})
    width = _LEFT + len(panels) * (_WIDTH + _GAP) + _LEGEND
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + _BOTTOM}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 22, title, size=14),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _LEFT + number * (_WIDTH + _GAP), xs, ys, x_label, has_labels=number == 0)
    parts += _legend(panels, width - _LEGEND)
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from at most `low` to at least `high`, two at least."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [times * 10.0**power for power in powers for times in (1, 2, 5)]
    first = max(step for step in steps if step <= low)
    last = min(step for step in steps if step >= high and step > first)
    return [step for step in steps if first <= step <= last]


def _panel(
    panel: Panel, left: float, xs: Sequence[float], ys: Sequence[float], x_label: str, has_labels: bool
) -> Iterable[str]:
    def place(x: float, y: float) -> tuple[float, float]:
        across = _fraction(x, xs[0], xs[-1])
        return left + 8 + across * (_WIDTH - 16), _TOP + _HEIGHT * (1 - _fraction(y, ys[0], ys[-1]))

    yield _text(left + _WIDTH / 2, _TOP - 10, panel.title, anchor="middle")
    yield f'<rect x="{left}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#888"/>'
    for y in ys:
        _, down = place(xs[0], y)
        yield f'<path d="M{left},{down:.1f} h{_WIDTH}" stroke="#ddd"/>'
        if has_labels:
            yield _text(left - 6, down + 4, f"{y:g}", anchor="end")
    for x in xs:
        yield _text(place(x, ys[0])[0], _TOP + _HEIGHT + 16, f"{x:g}", anchor="middle")
    yield _text(left + _WIDTH / 2, _TOP + _HEIGHT + 36, x_label, anchor="middle")
    for curve in panel.curves:
        yield _line([place(*point) for point in curve.points], curve)


def _fraction(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _line(points: Sequence[tuple[float, float]], curve: Curve) -> str:
    colour = _COLOURS[curve.number % len(_COLOURS)]
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    look = 'stroke-dasharray="5 4" stroke-width="1"' if curve.is_dashed else 'stroke-width="2"'
    return f'<polyline points="{way}" fill="none" stroke="{colour}" {look}/>'


def _legend(panels: Sequence[Panel], left: float) -> Iterable[str]:
    curves = {c.label: c for panel in panels for c in panel.curves if not c.is_dashed}
    for row, (label, curve) in enumerate(curves.items()):
        down = _TOP + 12 + 20 * row
        yield _line([(left, down), (left + 24, down)], curve)
        yield _text(left + 30, down + 4, label)
    yield _text(left, _TOP + 12 + 20 * len(curves) + 4, "dashed: forecast")


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
