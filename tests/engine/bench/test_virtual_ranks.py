"""Goals beside figures that are given."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from engine.bench import virtual_ranks


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
