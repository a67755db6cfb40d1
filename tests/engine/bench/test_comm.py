"""Ratios of rounds, from figures that are given."""

import pytest

from engine.bench import comm
from engine.bench.__main__ import main, parser
from engine.doctor.findings import Findings
from engine.doctor.placement import Round, Rounds
from engine.doctor.settings import Settings


def rounds(reduce: float, dispatch: float, combine: float) -> Rounds:
    return Rounds(*(Round(us * 1e-6, 14336) for us in (reduce, dispatch, combine)))


def test_ratios_of_fused_reduce_and_sharded_exchange():
    found = Findings(
        {"all-reduce": {1: 12e-6, 16: 14e-6}},
        {
            "symm_replicated": {1: rounds(5, 0, 5), 16: rounds(7, 0, 7)},
            "symm_sharded": {1: rounds(3, 4, 5), 16: rounds(3, 4, 10)},
        },
        {},
        [4e12],
    )
    first, second = comm.report(Settings(2, 2, "cuda"), found, {1: 15e-6}).rows
    assert first["G4"] == pytest.approx(5 / 15) and first["G4 goal"] == 0.45
    assert second["G4"] is None and second["G4 goal"] is None
    assert first["G4b"] == pytest.approx(9 / 12) and second["G4b"] == pytest.approx(1.0)
    assert first["symm_sharded"] == pytest.approx((61 * 3 + 60 * 4 + 61 * 5) / 61)


def test_what_was_not_measured_has_no_ratio():
    found = Findings({"all-reduce": {1: 1e-3}}, {"allreduce": {1: rounds(900, 0, 900)}}, {"symm_sharded": "x"}, [1e9])
    report = comm.report(Settings(2, 2, "cpu"), found, {1: 1e-3})
    assert report.rows[0]["G4"] is None and report.rows[0]["G4b"] is None and report.rows[0]["G4b goal"] is None
    assert "symm_sharded: no figure: x." in report.notes


def test_hidden_fraction():
    assert comm.hidden_fraction(10e-3, 9e-3, 1e-3) == pytest.approx(0.0)
    assert comm.hidden_fraction(9.2e-3, 9e-3, 1e-3) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="more than one rank"):
        comm.hidden_fraction(1, 1, 0)


def test_virtual_ranks_are_none_unless_asked_for(capsys):
    assert parser().parse_args(["comm"]).virtual_ranks is None
    assert parser().parse_args(["comm", "--virtual-ranks", "8"]).virtual_ranks == 8
    with pytest.raises(SystemExit):
        parser().parse_args(["comm", "--virtual-ranks", "3"])
    assert "invalid choice: 3" in capsys.readouterr().err


def test_virtual_ranks_need_a_gpu(capsys):
    assert main(["comm", "--virtual-ranks", "8", "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert said.err == "error: --virtual-ranks 8 measures GPU kernels; run it on a machine with a GPU.\n"
    assert not said.out


def test_virtual_ranks_come_with_their_own_sizes(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert main(["comm", "--virtual-ranks", "8", "--rows", "4"]) == 2
    assert "leave out --tp, --ep and --rows" in capsys.readouterr().err
