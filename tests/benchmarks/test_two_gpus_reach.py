"""The table of what two GPUs are to reach: figures come from where they were measured, and verdicts are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.two_gpus_parts import PARTS
from benchmarks.two_gpus_reach import KNOWN, Reach, Results, rows

OPTIONS = {"device": "cuda", "dry_run": False, "only": []}


def write(folder: Path, part: str, items: dict, options: dict = OPTIONS) -> None:
    content = {"part": part, "complete": True, "items": items, "options": options}
    content |= {"device": "2x made up", "date": "today", "versions": {"torch": "2.11.0"}}
    (folder / f"{part}.json").write_text(json.dumps(content))


def steps(**milliseconds: list[float]) -> dict:
    points = ("1 @ 4096", "8 @ 4096", "64 @ 2048")
    items = {
        name: {"rows": [{"step": f"decode {point}", "ms": ms} for point, ms in zip(points, times, strict=True)]}
        for name, times in milliseconds.items()
    }
    hidden = {"hidden": {"auto": {"1 @ 4096": {"hidden": 0.5, "net": 0.3}}}}
    return items | {"hidden": hidden, "nccl_a2a": {"skipped": "why"}}


@pytest.fixture
def folder(tmp_path) -> Path:
    measured = [{"T": 1, "G4": 0.3, "G4b": 0.7}, {"T": 8, "G4": 0.5, "G4b": 0.8}, {"T": 128, "G4": 0.7, "G4b": 0.9}]
    measured.append({"T": 512, "G4": None, "G4b": 9.0, "all-reduce": 4.0})
    write(tmp_path, "comm", {"engine.bench": {"result": {"rows": measured}}})
    write(tmp_path, "steps_ep1", steps(allreduce=[8, 20, 40], auto=[6, 16, 41], silent=[1, 1, 1]))
    write(tmp_path, "steps_ep2", steps(allreduce=[9, 20, 40], symm_scatter=[6.6, 19, 39]))
    kills = [{"fault": fault, "ended": s, "left": 0, "reason": "r"} for fault, s in (("kill", 9.0), ("stop", 40.0))]
    disagreement = {"fault": "disagree", "ended": 99.0, "left": 0, "reason": "r"}
    write(tmp_path, "drills", {"llm kill": {"result": kills}, "llm disagree": {"result": [disagreement]}})
    return tmp_path


def found(folder: Path, **more) -> dict[str, Reach]:
    return {row.what: row for row in rows(Results(folder, **more))}


def test_rounds_are_the_worst_of_their_sizes(folder):
    by_name = found(folder)
    few = by_name["fused reduce + residual + RMSNorm over NCCL all-reduce + two kernels, T = 1..8"]
    assert (few.measured, few.verdict) == (0.5, "missed by 11.1 %")
    many = by_name["fused reduce + residual + RMSNorm over NCCL all-reduce + two kernels, T = 128"]
    assert (many.measured, many.verdict) == (0.7, "met")
    exchanged = by_name["dispatch + combine (`symm_sharded`) over one NCCL all-reduce, T = 1..128"]
    assert (exchanged.measured, exchanged.verdict) == (0.9, "met")


def test_steps_are_those_of_auto_or_else_the_fastest_and_never_silent(folder):
    by_name = found(folder)
    assert by_name["TP2 step, 1 @ 4096, ms"].measured == 6 and "`auto`" in by_name["TP2 step, 1 @ 4096, ms"].note
    ratio = by_name["EP2 step over TP2 step, 1 @ 4096"]
    assert ratio.measured == pytest.approx(1.1) and ratio.verdict == "missed by 2.8 %"
    assert by_name["step with `auto` over `allreduce`, any T"].measured == pytest.approx(41 / 40)
    few = by_name["step with `auto` over `allreduce`, T <= 8"]
    assert few.measured == pytest.approx(0.8) and few.verdict == "met, stretch too"
    hidden = by_name["communication hidden under weight reads"]
    assert (hidden.measured, hidden.verdict) == (0.5, "met") and "0.30" in hidden.note


def test_the_slowest_of_killed_and_hung_counts(folder):
    row = found(folder)["a killed or hung rank: all out, s"]
    assert row.measured == 40 and row.verdict == "missed by 33.3 %"


def test_what_has_not_run_says_so(tmp_path):
    every = rows(Results(tmp_path))
    assert {row.verdict for row in every} == {"not run"} and len(every) > 20
    assert {row.part for row in every} <= set(PARTS)


def test_known_figures_of_the_project_stand_in_and_are_named(tmp_path):
    results = Results(tmp_path, plots.HERE)
    by_name = {row.what: row for row in rows(results)}
    assert results.sources == KNOWN
    assert by_name["TP2 step, 8 @ 4096, ms"].measured == pytest.approx(18.8, abs=0.1)
    assert by_name["a killed or hung rank: all out, s"].measured == pytest.approx(18.2)


@pytest.mark.parametrize(
    ("measured", "goal", "stretch", "more", "verdict"),
    [
        (1.0, 1.0, 0.5, False, "met"),
        (0.5, 1.0, 0.5, False, "met, stretch too"),
        (0.9, 1.0, None, True, "missed by 10.0 %"),
        (1.0005, 1.0, None, False, "missed by 0.05 %"),
        (1.2, 1.0, 1.1, True, "met, stretch too"),
        (3, 0, None, False, "missed: 3"),
        (0, 0, None, False, "met"),
    ],
)
def test_verdicts(measured, goal, stretch, more, verdict):
    assert Reach("what", measured, goal, stretch, "comm", more_is_better=more).verdict == verdict


def test_summary_table_and_charts_are_written(folder, tmp_path_factory, capsys):
    out = tmp_path_factory.mktemp("out") / "two"
    assert plots.main([str(folder), "--out", str(out)]) == 0
    table = capsys.readouterr().out
    assert out.with_suffix(".md").read_text() == table and "dry run" not in table
    kept = json.loads(out.with_suffix(".json").read_text())
    assert kept["parts"]["steps_ep1"]["left out"] == {"nccl_a2a": "why"}
    assert len(kept["reach"]) == table.count("\n| ")
    assert "- comm.json: 2x made up, torch 2.11.0, today" in table
    assert sorted(file.name for file in out.parent.glob("*.svg")) == ["two_rounds.svg", "two_steps.svg"]


def test_a_dry_run_is_not_taken_for_figures(tmp_path, capsys):
    write(tmp_path, "comm", {}, OPTIONS | {"device": "cpu"})
    assert plots.main([str(tmp_path)]) == 0 and plots.DRY in capsys.readouterr().out
    assert plots.main([str(tmp_path / "none")]) == 2 and "is no folder" in capsys.readouterr().err
