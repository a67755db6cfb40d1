"""Short measurements on ranks that stay: any function, any number of times."""

from __future__ import annotations

import pytest

from benchmarks import rank_calls
from engine.comm.parallel_state import ParallelState

WORK = "benchmarks.two_gpus_latency:obstacles_of_rank"
SIZES = {"width": 64, "num_experts": 16, "top_k": 8, "dtype": "float32"}


def test_a_call_returns_what_the_function_does_on_this_rank():
    caller = rank_calls.Caller(ParallelState(rank=1, tp=2, ep=2))
    answers = [caller.call(WORK, SIZES) for _ in range(2)]
    assert answers[0] == answers[1] and answers[0]["allreduce"] is None
    assert "runs on CUDA GPUs alone" in answers[0]["deepep"]


@pytest.mark.slow
def test_a_team_goes_on_after_a_call_that_failed():
    with rank_calls.team(2, 2, "cpu") as team:
        with pytest.raises(RuntimeError, match="TypeError"):
            rank_calls.call(team, WORK, {}, 60)
        ranks = rank_calls.call(team, WORK, SIZES, 60)
    assert len(ranks) == 2 and ranks[0] == ranks[1]
