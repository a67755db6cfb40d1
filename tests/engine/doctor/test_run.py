"""The doctor as a user starts it, on ranks of processors."""

import json
import os
import signal

import pytest

from tests.processes import PYTHON, TORCHRUN, running, until

TINY = ["--device", "cpu", "--model", "models/kimi_k25/tiny"]


THREE = ["--dispatchers", "reference,allreduce,nccl_a2a"]


def doctor(*options: str, launcher: list[str] = PYTHON) -> list[str]:
    return [*launcher, "-m", "engine.doctor", *TINY, *options]


def result(tmp_path, *options: str, launcher: list[str] = PYTHON) -> tuple[str, dict]:
    """What it prints and what it writes."""
    file = tmp_path / "doctor.json"
    with running(doctor(*options, "--json", str(file), launcher=launcher), tmp_path) as program:
        assert program.ends(120) == 0, program.output
        return program.output, json.loads(file.read_text())


def test_torchrun_ranks_are_joined(tmp_path):
    launcher = [*TORCHRUN, "--nproc-per-node", "2"]
    text, data = result(tmp_path, "--rows", "1,4", *THREE, launcher=launcher)
    assert text.count("Turnout's doctor: 2 ranks, EP2, on cpu") == 1
    assert len(data["read_rates"]) == 2
    for name in ("reference", "allreduce", "nccl_a2a"):
        assert set(data["dispatchers"][name]) == {"1", "4"}, data["refused"]
    assert set(data["collectives"]) == {"all-reduce", "reduce-scatter", "all-gather", "all-to-all"}
    assert data["dispatchers"]["nccl_a2a"]["4"]["dispatch"]["sent"] > 0
    assert data["dispatchers"]["allreduce"]["4"]["dispatch"]["sent"] == 0


def test_one_rank_needs_no_others(tmp_path):
    text, data = result(tmp_path, "--rows", "1,2")
    assert "1 rank, TP1, on cpu" in text and data["collectives"] == {} and "reference" in data["dispatchers"]


def test_simulated_cliff_is_found_and_named(tmp_path):
    """The tiny model's rows times 4 reach the cliff; past it a call takes 40 times as long."""
    text, data = result(
        tmp_path, "--tp", "2", "--rows", "1,4", "--simulate-link", "2000,1,1024,40", "--dispatchers", "allreduce"
    )
    assert "SIMULATED LINK: 2000 us a hop" in text and "is a cliff" in text and "NCCL_PROTO=LL,LL128,Simple" in text
    assert any(sentence.startswith("all-reduce: ") for sentence in data["cliffs"])
    assert "Mend the cliff" in data["advice"][0] and "Speculation does not pay on this machine" in data["advice"][-1]
    assert "Ranks on processors: there is no NCCL" in text


def test_winner_moves_from_one_shot_to_all_reduce_as_bytes_grow(tmp_path):
    """Four ranks: one hop of 3 x the bytes against two hops of 1.5 x; they meet where 1.5 x the bytes take a hop."""
    options = ["--tp", "4", "--rows", "1,64", "--simulate-link", "20000,0.0003"]
    options += ["--dispatchers", "symm_replicated,allreduce"]
    _, data = result(tmp_path, *options)

    def layer(name: str, rows: str) -> float:
        return sum(one["seconds"] for one in data["dispatchers"][name][rows].values())

    assert layer("symm_replicated", "1") < layer("allreduce", "1")
    assert layer("symm_replicated", "64") > layer("allreduce", "64")
    assert data["fastest"] == {"1": "symm_replicated", "64": "allreduce"}


def test_rank_that_dies_is_named(tmp_path):
    with running(doctor("--tp", "2", "--rows", "1"), tmp_path) as program:
        victim = until(lambda: program.find(r"doctor\.rank --rank 1 "), 30, "rank 1 starts")[0]
        os.kill(victim, signal.SIGKILL)
        assert program.ends(60) == 1
        assert "error: The ranks could not do a first all-reduce" in program.output
        assert "rank 1: was killed by signal 9" in program.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tp", "2", "--ep", "3"], "--ep 3 must divide --tp 2"),
        (["--rows", "0"], "--rows takes whole numbers"),
        (["--rows", "x"], "--rows takes whole numbers"),
        (["--simulate-link", "1"], "give latency_us,GB/s"),
        (["--dispatchers", "quick"], "--dispatchers names quick; use some of reference"),
        (["--dispatchers", ""], "--dispatchers names none; use some of reference"),
        (["--seconds", "0"], "--seconds 0 must lie above 0"),
        (["--json", "/nowhere/x.json"], "its folder does not exist"),
        (["--model", "tests"], "tests holds no config.json"),
        (["--tp", "3"], "--ep 3 does not divide the model's"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(options, said, capsys):
    from engine.doctor.__main__ import main

    assert main([*TINY, *options]) == 2
    assert said in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused(monkeypatch, capsys):
    from engine.doctor import plot
    from engine.doctor.__main__ import main

    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert main([*TINY, "--plot", "x.png"]) == 2
    assert "install Turnout with the extra plot" in capsys.readouterr().err
