"""longest_step from end to end on a small share: every arm prefills the whole prompt, and the figures add up."""

from __future__ import annotations

import json

import pytest

from engine.bench.__main__ import main
from engine.bench.longest_step import Arm, percentile, row_of
from engine.bench.report import MeasurementError
from tests.shares import config_directory

SHAPE = ["--tp-share", "2", "--device", "cpu", "--streams", "2", "--context", "16", "--idle-steps", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(config_directory(tmp_path_factory.mktemp("share") / "model"))


def test_arms_with_and_without_a_bound(tmp_path, model):
    file = tmp_path / "result.json"
    arguments = ["--prompt", "400", "--bounds", "1000,0.001", "--budgets", "128,512", "--stream-tokens", "600"]
    assert main(["longest_step", "--model", model, *SHAPE, *arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert [(row["longest step ms"], row["token budget"]) for row in rows] == [
        (1000.0, 128), (0.001, 128), (None, 128), (None, 512)
    ]  # fmt: skip
    for row in rows:
        assert row["idle p50 ms"] > 0 and row["p50 ms"] <= row["p99 ms"] <= row["max ms"]
        assert row["prefill tok/s"] == pytest.approx(400 / row["first token s"]) and row["prefilled"] == 400
    loose, tight, some, many = rows
    assert many["steps"] == 1 and some["steps"] == 4, "chunks as long as the budget, beside two streams"
    assert loose["p99 / bound"] == pytest.approx(loose["p99 ms"] / 1000) and many["p99 / bound"] is None
    assert tight["steps"] > some["steps"] and loose["steps"] > some["steps"], "both begin with small chunks"
    assert loose["chunk, first tenth"] <= 16 < some["chunk, first tenth"] <= 126
    assert max(row["/ unbounded"] for row in rows[2:]) == 1.0
    for row, slowest in zip(rows, result["slowest_steps"], strict=True):
        assert max(step["ms"] for step in slowest) == row["max ms"] and slowest[-1]["computed"] <= 400
        assert [step["number"] for step in slowest] == sorted({step["number"] for step in slowest})
    assert result["settings"]["prompt"] == 400 and result["measured_at_start"] == []


def test_a_row_of_known_gaps():
    gaps = [0.05] * 198 + [0.06, 0.2]
    row = row_of(Arm([0.01], gaps, [1000] * 10 + [100] * 90 + [50] * 10, 4.0, is_done=True), 50.0, 2048)
    assert (row["p50 ms"], row["p99 ms"], row["max ms"]) == pytest.approx((50.0, 60.0, 200.0))
    assert row["p99 / bound"] == pytest.approx(1.2) and row["prefill tok/s"] == 19_500 / 4
    assert row["first token s"] == 4.0 and row["prefilled"] == 19_500
    assert (row["chunk, first tenth"], row["chunk, last tenth"], row["steps"]) == (1000, 50, 110)
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--bounds", "0"], "--bounds"),
        (["--bounds", "fast"], "--bounds"),
        (["--budgets", "0"], "--budgets"),
        (["--streams", "0"], "--streams"),
        (["--idle-steps", "0"], "--idle-steps"),
        (["--stream-tokens", "10"], "--stream-tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, capsys, arguments, word):
    assert main(["longest_step", "--model", model, *SHAPE, *arguments]) == 2
    assert word in capsys.readouterr().err


def test_an_arm_whose_streams_end_too_soon_is_given_up(tmp_path, model):
    file = tmp_path / "result.json"
    arguments = ["--prompt", "2000", "--bounds", "0.001", "--budgets", "64", "--stream-tokens", "30"]
    assert main(["longest_step", "--model", model, *SHAPE, *arguments, "--json", str(file)]) == 0
    for row in json.loads(file.read_text())["rows"]:
        assert row["first token s"] is None and 0 < row["prefilled"] < 2000 and row["prefill tok/s"] > 0


def test_an_arm_in_which_nothing_was_prefilled_is_refused():
    with pytest.raises(MeasurementError, match="--stream-tokens"):
        row_of(Arm([0.01]), 50.0, 2048)
