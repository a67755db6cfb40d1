"""Goals beside figures that are given."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.bench import virtual_ranks
from engine.bench.virtual_world import Alone
from engine.kernels.gpu.channel import Shape


def measured(ranks: int, num_rows: int) -> dict:
    return {
        "ranks": ranks,
        "tokens": num_rows,
        "one-shot": 4.0,
        "two-shot": 5.0,
        "dispatch + combine": 9.0,
        "unfused sum, residual + norm": 3.2,
    }


def test_goals_are_for_eight_ranks():
    row = virtual_ranks.with_goals(measured(8, 8))
    assert (row["round goal"], row["ratio goal"], row["sparse goal"]) == (6.0, 1.5, 10.0)
    assert row["round / unfused"] == pytest.approx(1.25)
    row = virtual_ranks.with_goals(measured(8, 64))
    assert (row["round goal"], row["ratio goal"], row["sparse goal"]) == (12.0, 1.5, None)
    row = virtual_ranks.with_goals(measured(4, 8))
    assert (row["round goal"], row["ratio goal"], row["sparse goal"]) == (None, None, None)


def test_report_has_the_epilogue_form_below(monkeypatch):
    monkeypatch.setattr(virtual_ranks, "measure", lambda ranks, num_rows, device: measured(ranks, num_rows))
    fused = [{"ranks a launch": 1, "I": 256, "T": 1, "apart": 7.0, "fused": 6.5}]
    monkeypatch.setattr(virtual_ranks.epilogue, "measure_all", lambda ranks, device: fused)
    report = virtual_ranks.report(8, torch.device("cpu"))
    assert [row["T"] for row in report.rows] == [1, 2, 4, 8, 16, 32, 64]
    assert "ranks a launch" in report.notes[-1] and "6.5" in report.notes[-1]
    assert report.data["epilogue"] == fused and len(report.data["measured"]) == 7


def test_links_with_a_delay_leave_room_for_what_they_serve():
    alone = Alone(Shape(2, 64, 40, torch.float32), torch.device("cpu"), link_ns=1000)
    with pytest.raises(ValueError, match="carry fewer at a time"):
        alone.carry(40)
