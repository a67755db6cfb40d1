"""A line chart as SVG, without a plotting library: series of points over axes that may be logarithmic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 210, 40, 48
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2", "#7f7f7f")
_TEXT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True)
class Axis:
    """Where values lie between two pixels. base: of its logarithm and its ticks; None for an even scale."""

    low: float
    high: float
    start: float
    end: float
    base: float | None = None

    def place(self, value: float) -> float:
        low, high, at = (self._scaled(one) for one in (self.low, self.high, value))
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.base is None:
            step = 10 ** math.floor(math.log10((self.high - self.low) or 1.0))
            step = next(s for s in (step, step / 2, step / 5) if (self.high - self.low) / s >= 4 or s == step / 5)
            first = math.ceil(self.low / step - 1e-9)
            return [round(n * step, 10) for n in range(first, math.floor(self.high / step + 1e-9) + 1)]
        powers = range(math.floor(self._scaled(self.low)), math.ceil(self._scaled(self.high)) + 1)
        steps = (1, 2, 5) if self.base == 10 else (1,)
        ticks = [self.base**power * step for power in powers for step in steps]
        return [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]

    def _scaled(self, value: float) -> float:
        return value if self.base is None else math.log(value, self.base)


def line_chart(
    title: str,
    series: dict[str, list[tuple[float, float]]],
    x_label: str,
    y_label: str,
    x_base: float | None = 2,
    y_base: float | None = None,
) -> str:
    """SVG of `series`: name -> (x, y) pairs, above zero on an axis with a base. Raises ValueError without a point."""
    xs, ys = ([point[i] for points in series.values() for point in points] for i in (0, 1))
    if not xs:
        raise ValueError(f"the chart {title!r} has no points.")
    low = min(ys) if y_base else min(0.0, *ys)
    x_axis = Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, x_base)
    y_axis = Axis(low, max(ys) * 1.02, HEIGHT - _BOTTOM, _TOP, y_base)
    parts = [f'<text x="{_LEFT}" y="22" {_TEXT} font-weight="bold">{escape(title)}</text>', *_frame(x_axis, y_axis)]
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 10}" {_TEXT}>{escape(x_label)}</text>')
    parts.append(f'<text transform="translate(16 {middle}) rotate(-90)" {_TEXT}>{escape(y_label)}</text>')
    for number, (name, points) in enumerate(series.items()):
        parts += _line(number, name, points, x_axis, y_axis)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', ground, *parts, "</svg>\n"])


def _frame(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle" {_TEXT}>{value:g}</text>')
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" {_TEXT}>{value:g}</text>')
    return parts


def _line(number: int, name: str, points: list[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    dash = ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else ""
    places = [f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in points]
    dots = [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="2.5" fill="{colour}"/>' for p in places]
    y = _TOP + 12 + 18 * number
    legend = f'<text x="{WIDTH - _RIGHT + 34}" y="{y + 4}" {_TEXT}>{escape(name)}</text>'
    line = f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
    key = f'<line x1="{WIDTH - _RIGHT + 10}" x2="{WIDTH - _RIGHT + 30}" y1="{y}" y2="{y}" stroke="{colour}"{dash}/>'
    return [line, *dots, key, legend]
