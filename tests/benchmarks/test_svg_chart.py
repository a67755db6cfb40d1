"""Charts without a plotting library: points lie where the axes say, and the file is well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.svg_chart import Axis, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_points_lie_between_the_axes_and_the_legend_names_them():
    series = {"a < b": [(1, 10.0), (2, 100.0), (4, 1000.0)], "c": [(1, 1000.0)]}
    root = ElementTree.fromstring(line_chart("T & U", series, "rows", "us", y_base=10))
    first = [tuple(map(float, p.split(","))) for p in root.find(f"{SVG}polyline").get("points").split()]
    assert first[1][0] == pytest.approx((first[0][0] + first[2][0]) / 2, abs=0.1), "two is half way from one to four"
    assert first[0][1] > first[1][1] > first[2][1]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"T & U", "a < b", "c", "rows", "us"} <= set(texts)
    assert len(list(root.iter(f"{SVG}circle"))) == 4


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(1, 128, 0, 10, 2), [1, 2, 4, 8, 16, 32, 64, 128]),
        (Axis(6, 230, 0, 10, 10), [10, 20, 50, 100, 200]),
        (Axis(0, 1, 0, 10), [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Axis(2, 3, 0, 10), [2, 2.2, 2.4, 2.6, 2.8, 3.0]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(axis, ticks):
    assert axis.ticks() == pytest.approx(ticks)
    assert (axis.place(axis.low), axis.place(axis.high)) == (0, 10)


def test_a_single_point_is_drawn_and_none_is_refused():
    assert "<circle" in line_chart("one", {"a": [(1, 5.0)]}, "x", "y")
    with pytest.raises(ValueError, match="no points"):
        line_chart("none", {"a": []}, "x", "y")
