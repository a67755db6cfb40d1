"""Forecasts, tables and plots of what the parts of `benchmarks.full_size` leave."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml

import pytest

from benchmarks import full_size, full_size_plots
from benchmarks.full_size_forecast import FullModel
from benchmarks.full_size_plots import Curve, Panel, svg, ticks
from benchmarks.full_size_shape import Options
from benchmarks.full_size_tables import labelled, markdown, summary, write

MODEL = {"model": "models/kimi_k25/full", "overrides": {}, "dtype": "bfloat16"}
NAMES = ["doctor", "ep8_replicated", "eagle3", "http"]


@pytest.fixture(scope="module")
def model():
    return FullModel(8, 8)


def test_rounds_are_those_of_the_documented_model(model):
    """docs/dispatch.md, eight ranks over NVLink, ms a step."""
    wanted = {
        ("symm_replicated", 1): 0.45,
        ("symm_scatter", 8): 0.62,
        ("symm_sharded", 128): 1.80,
        ("allreduce", 4): 1.30,
    }
    for (name, rows), milliseconds in wanted.items():
        assert model.comm_us(name, rows) / 1e3 == pytest.approx(milliseconds, abs=0.006)
    assert (model.used("auto", 1), model.used("auto", 8)) == ("symm_replicated", "symm_scatter")
    assert model.num_rounds("allreduce") == 122 and model.num_rounds("nccl_a2a") == 182


def test_a_step_is_kernels_and_rounds(model):
    kernels = {n: model.step_ms(n, 8, 4096) - model.comm_us(n, 8) / 1e3 for n in ("allreduce", "auto", "symm_sharded")}
    assert kernels["allreduce"] == pytest.approx(kernels["auto"])
    assert kernels["symm_sharded"] > kernels["auto"] + 1  # the shared expert is whole there
    sliced = FullModel(8, 1)
    kernels = sliced.step_ms("auto", 1, 4096) - sliced.comm_us("auto", 1) / 1e3
    assert kernels == pytest.approx(3.87, rel=0.02)  # README's share of eight, measured without communication


def test_what_is_not_modelled_has_no_forecast(model):
    assert model.step_ms("nccl_a2a", 1, 4096) is None and "not measured" in model.obstacle("nccl_a2a")
    assert FullModel(8, 2).comm_us("symm_sharded", 1) is None and FullModel(8, 2).comm_us("auto", 1) > 0
    assert FullModel(4, 4, 192).prefill_ms is None and model.prefill_ms == pytest.approx(256.2, abs=0.1)


def step(name: str, rows: int, ms: float, comm: float) -> dict:
    return {
        "rows": rows,
        "dispatcher": name,
        "ms": ms,
        "comm us": comm,
        "spread": 0.1,
        "rounds": {"attention_reduce": 61, "moe_dispatch": 60, "moe_combine": 61},
        "bytes sent": {"attention_reduce": 2_000_000, "moe_dispatch": 0, "moe_combine": 1_000_000},
    }


def results(dry_run: bool = False, auto: float = 3.5) -> dict:
    options = Options("cuda", dry_run, 8).as_json()
    rates = {"no draft, 1": 100.0, "accept length 2.0, 1": 110.0, "accept length 3.0, 1": 180.0}
    items = {
        "ep8_replicated": {
            "memory": {"verdict": "fits"},
            "allreduce": {**MODEL, "rows": [step("allreduce", 1, 4.0, 1300.0), step("allreduce", 8, 8.0, 1290.0)]},
            "auto": {"rows": [step("symm_replicated", 1, auto, 500.0), step("symm_scatter", 8, 7.0, 600.0)]},
            "symm_scatter": {"error": "RuntimeError: rank 3 ended"},
            "prefill": {"rows": [{"step": "prefill 8192", "ms": 300.0, "tok/s": 27000.0}]},
        },
        "eagle3": {
            "costs, 1": {"rows": [], "gains": {"3.0": {"guesses": 3, "speedup": 1.9}}},
            **{key: {"row": {"tok/s": rate, "tokens a step": 1.0}} for key, rate in rates.items()},
        },
    }
    for part in items.values():
        for item in part.values():
            item["item seconds"] = 1.5
    return {
        name: {"options": options, "items": part, "date": "today", "device": "8x H200"} for name, part in items.items()
    }


def test_every_figure_has_its_forecast_beside_it(model):
    found = summary(results(), NAMES)
    row = next(row for row in found["steps"] if row["moe_comm"] == "auto")
    assert (row["ms"], row["rounds"], row["MB"], row["used"]) == (3.5, 122, 3.0, "symm_replicated")
    assert row["forecast ms"] == model.step_ms("auto", 1, 4096) and row["forecast comm us"] == model.comm_us("auto", 1)
    assert row["forecast rounds"] == 122 and row["forecast MB"] == pytest.approx(2 * 7 * 7168 * 2 * 61 / 1e6)
    gain = next(row for row in found["eagle3"] if row["accept length"] == 3.0)
    assert gain["speedup"] == pytest.approx(1.8) and gain["speedup by steps"] == 1.9
    assert gain["forecast speedup"] == model.speedup(3.0)
    assert found["not run"] == {
        "doctor": "was not run", "http": "was not run", "ep8_replicated / symm_scatter": "RuntimeError: rank 3 ended",
    }  # fmt: skip
    assert found["measured with"] == MODEL
    assert found["seconds of parts"]["ep8_replicated"] == 7.5


@pytest.mark.parametrize(("auto", "met"), [(3.5, True), (4.2, False)])
def test_what_was_to_be_reached_is_held_against_what_was_measured(auto, met):
    reach = {row["claim"]: row for row in summary(results(auto=auto), NAMES)["reach"]}
    assert [row["met"] for row in reach.values()] == [met, True, True, met, True]
    assert reach["ms of a step, T = 1, auto, best ep"]["measured"] == auto
    empty = {"doctor": results()["eagle3"] | {"items": {}}}
    assert all(row["met"] is None for row in summary(empty, NAMES)["reach"])


def test_a_dry_runs_figures_say_that_they_are_no_speeds(tmp_path):
    for name, result in results(dry_run=True).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert write(tmp_path, NAMES) == 0
    found = json.loads((tmp_path / "full_size.json").read_text())
    assert found["figures"].startswith("A DRY RUN") and found["reach"] == []
    for name in ("steps", "prefill", "eagle3"):
        assert not {"ms", "tok/s", "speedup", "comm us"} & set(found[name][0])
    assert found["steps"][0]["ms (dry run, no speed)"] == 4.0
    assert found["steps"][0]["forecast ms"] == pytest.approx(FullModel(8, 8).step_ms("allreduce", 1, 4096), rel=1e-3)
    text = (tmp_path / "full_size.md").read_text()
    assert "ms (dry run, no speed) | forecast ms" in text and "- http: was not run" in text
    assert "DRY RUN" in (tmp_path / "full_size_ms.svg").read_text()


def test_parts_of_different_options_make_no_table(tmp_path):
    mixed = results() | {"http": results(dry_run=True)["eagle3"]}
    with pytest.raises(ValueError, match="different options"):
        summary(mixed, NAMES)
    assert write(tmp_path, NAMES) == 2
    assert full_size.main(["--tables", "--out", str(tmp_path)]) == 2


def test_tables_have_a_cell_for_every_column():
    found = summary(results(), NAMES)
    assert labelled(found)["forecasts"] == found["forecasts"]
    lines = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert len(lines) > 12 and "| 8 | auto | 1 | symm_replicated | 3.5 |" in markdown(found)


def test_plots_are_drawn_to_scale():
    text = svg([Panel("a <b>", [Curve("x", 0, [(1, 1.0), (10, 10.0)]), Curve("x", 0, [(1, 2.0)], True)])], "title", "T")
    root = xml.fromstring(text)
    lines = [one.attrib for one in root if one.tag.endswith("polyline")]
    assert len(lines) == 3  # one of them in the legend
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in lines[0]["points"].split())
    assert x1 > x0 and y1 == full_size_plots._TOP and y0 == full_size_plots._TOP + full_size_plots._HEIGHT
    assert "stroke-dasharray" in lines[1]
    assert "a <b>" in [one.text for one in root]


def test_ticks_enclose_what_is_drawn():
    assert ticks(3.0, 41.0) == [2, 5, 10, 20, 50] and ticks(1.0, 1.0) == [1, 2]
    assert ticks(0.4, 1.8) == pytest.approx([0.2, 0.5, 1, 2])
