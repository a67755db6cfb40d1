"""The doctor on GPUs: everything is measured in graphs within its limit, and nothing is left running."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()
two = pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")


def doctor(tmp_path, *options: str, module: str = "engine.doctor") -> tuple[str, dict]:
    """What it prints and what it writes, within its limit and a little for starting and ending."""
    file = tmp_path / "doctor.json"
    command = [sys.executable, "-m", *module.split(), *options, "--json", str(file)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    assert time.monotonic() - started < 90
    return done.stdout, json.loads(file.read_text())


def test_one_gpu(tmp_path):
    text, data = doctor(tmp_path, "--tp", "1")
    assert data["links"]["gpus"][0]["memory"] > 0 and "reference" in data["dispatchers"]
    assert data["read_rates"][0] > 1e11 and "One rank exchanges nothing" in text


@two
def test_two_gpus(tmp_path):
    _, data = doctor(tmp_path, "--tp", "2")
    assert [(pair["source"], pair["target"]) for pair in data["links"]["pairs"]] == [(0, 1), (1, 0)]
    assert all(pair["bytes_per_second"] > 1e9 and not pair["failed"] for pair in data["links"]["pairs"])
    for curve in data["collectives"].values():
        assert set(map(int, curve)) == {2**n for n in range(10)} and all(0 < us < 0.05 for us in curve.values())
    assert "allreduce" in data["dispatchers"]
    settled = {row["all-reduce in a graph"]: row["what happened"] for row in data["settled"]}
    assert settled["NCCL Ring LL"] == settled["NCCL Ring Simple"] == "survives capture"
    assert settled["torch symmetric memory, one-shot"]


@two
def test_simulated_link_is_in_the_graphs(tmp_path):
    """Two hops of 500 us are in every all-reduce, and 40 times that past the cliff."""
    text, data = doctor(tmp_path, "--tp", "2", "--quick", "--rows", "1,4", "--simulate-link", "500,20,32768,40")
    assert data["collectives"]["all-reduce"]["1"] == pytest.approx(1.0e-3, rel=0.2)
    assert data["collectives"]["all-reduce"]["4"] == pytest.approx(40e-3, rel=0.2)
    assert "is a cliff" in text and "Speculation does not pay on this machine" in text


@two
def test_bench_comm(tmp_path):
    _, data = doctor(tmp_path, "--tp", "2", module="engine.bench comm")
    rows = {row["T"]: row for row in data["rows"]}
    assert rows[1]["all-reduce, sum, norm"] > rows[1]["all-reduce"] > 0
    if "symm_replicated" in data["dispatchers"]:
        assert 0 < rows[1]["G4"] < 2
