"""Forced accept lengths through cores that are led: on one rank in this process, and on two over gloo."""

from __future__ import annotations

import pytest
import torch

from benchmarks import eagle3_forced
from engine.bench import spec_share
from engine.comm.parallel_state import ParallelState
from engine.config import TINY_CHECKPOINT

SETTINGS = {"model": str(TINY_CHECKPOINT), "overrides": {"num_hidden_layers": 4}, "replays": 1, "chunk": 64}


def test_each_length_is_what_the_steps_bring(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(spec_share, "_LEAD", 12)
    found = eagle3_forced.rows_of_rank(ParallelState(), **SETTINGS, points="2@20", tokens=40, lengths=[1.0, 3.0])
    assert [row["guesses"] for row in found["costs"]] == ["no draft", 0, 1, 2, 3]
    plain, useless, three = found["engine"]
    assert (plain["accept length"], plain["tokens a step"], plain["verify steps"]) == ("no draft", 1.0, 0.0)
    assert useless["tokens a step"] == 1.0
    assert three["tokens a step"] > 1.3 and three["verify steps"] > 0
    assert three["speedup"] == pytest.approx(three["tok/s"] / plain["tok/s"])
    assert found["layers"] == 4 and not found["graphs"]


@pytest.mark.slow
def test_two_ranks_follow_what_rank_0_plans():
    settings = SETTINGS | {"points": "1@20", "tokens": 32, "lengths": [2.0]}
    found = eagle3_forced.measure(2, 2, "cpu", 120, settings)
    assert found["dispatchers"] == "allreduce" and found["engine"][1]["tokens a step"] > 1
