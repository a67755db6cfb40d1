"""The model of rounds between eight ranks: its inputs come out again, and the documents show what it gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.doctor.modelled import NVLINK, PCIE, RANKS, WAYS, full_model, layer, report, rows_sent, table, wanted_ranks

EIGHT = full_model()
ROOT = Path(__file__).parents[3]


def microseconds(rounds) -> tuple[float, float]:
    return rounds.reduce.seconds * 1e6, rounds.combine.seconds * 1e6


@pytest.mark.parametrize(("name", "rows", "expected"), [
    ("symm_replicated", 1, (3.5, 3.5)), ("symm_scatter", 64, (7.0, 7.0)), ("symm_sharded", 8, (4.9, 8.0)),
    ("allreduce", 128, (28.0, 28.0)),
])  # fmt: skip
def test_of_as_many_ranks_as_were_measured_it_gives_the_measurement(name, rows, expected):
    assert microseconds(layer(name, NVLINK, rows, replace(EIGHT, tp=2, ep=2))) == pytest.approx(expected)


@pytest.mark.parametrize("rows", [1, 4, 128])
def test_over_pcie_it_gives_the_published_lines(rows):
    kilobytes = rows * 14.336
    assert microseconds(layer("symm_replicated", PCIE, rows, EIGHT))[0] == pytest.approx(7.2 + 0.26 * kilobytes)
    assert microseconds(layer("allreduce", PCIE, rows, EIGHT))[1] == pytest.approx(24.1 + 0.016 * kilobytes)


def test_more_ranks_send_more():
    for name in WAYS.values():
        two, eight = (sum(rows_sent(name, 64, ranks, 384, 8)) for ranks in (2, 8))
        assert eight > two, name
        assert sum(microseconds(layer(name, NVLINK, 64, EIGHT))) > sum(
            microseconds(layer(name, NVLINK, 64, replace(EIGHT, tp=2, ep=2)))
        )


def test_ranks_that_a_row_wants():
    ids = torch.rand(4000, 384, generator=torch.Generator().manual_seed(0)).topk(8).indices
    held = (ids // (384 // RANKS)).unsqueeze(-1) == torch.arange(RANKS)
    assert wanted_ranks(RANKS, 384, 8) == pytest.approx(held.any(1).float().mean().item(), abs=0.01)


def test_a_step_has_122_rounds():
    one = layer("symm_replicated", PCIE, 1, EIGHT)
    assert EIGHT.comm_seconds(one) == pytest.approx(122 * one.reduce.seconds)
    assert EIGHT.num_rounds(one) == 122


def test_the_documents_show_this_table_as_modelled():
    text = (ROOT / "docs" / "dispatch.md").read_text()
    before, found, _ = text.partition(table(EIGHT))
    assert found, f"docs/dispatch.md must hold this:\n{table(EIGHT)}"
    assert "modelled" in before.splitlines()[-2].lower()
    for links in (NVLINK, PCIE):
        assert links.inputs in " ".join(text.split())
    assert table(EIGHT) in report() and report().startswith("MODELLED")
