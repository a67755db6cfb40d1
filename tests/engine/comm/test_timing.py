"""Ranks time together, agree on the slowest one's figure, and fail together."""

from __future__ import annotations

import pytest
import torch

from engine.comm.collectives import RankError, gather_json, together
from engine.comm.dispatch_reference import AllReduceDispatcher
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, build, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import time_calls, time_dispatcher
from tests.gloo_ranks import on_ranks

LIMITS = DispatchLimits(num_experts=8, width=32, top_k=3, max_tokens=16, dtype=torch.float32)
ROWS = (1, 5, 16)


def spin(rank: int) -> None:
    """Work that rank 1 has more of."""
    a = torch.ones(64, 64)
    for _ in range(400 if rank else 1):
        a = a @ a * 0.01


def slower_rank(parallel: ParallelState) -> float:
    return time_calls([lambda: spin(parallel.rank)], parallel, replays=5)


def quick_rank(parallel: ParallelState) -> float:
    return time_calls([lambda: spin(0)], parallel, replays=5)


def failing_rank(parallel: ParallelState) -> list[str]:
    """Each way to fail, on one rank or at another time than the first call, and a call that works afterwards."""
    calls = iter(range(100))

    def late() -> None:
        if parallel.rank == 1 and next(calls) == 2:
            raise OSError("the link is down")

    def soon() -> None:
        if parallel.rank == 0:
            raise MemoryError("no room")

    reasons = []
    for call in (late, soon):
        with pytest.raises(RankError) as caught:
            time_calls([call], parallel, replays=5)
        reasons.append(str(caught.value))
    assert time_calls([lambda: spin(0)], parallel, replays=2) > 0
    return reasons


class GivesUp(AllReduceDispatcher):
    """On rank 1 its kernels give up at the `round`-th call."""

    def __init__(self, parallel: ParallelState, round: int):
        super().__init__(parallel, LIMITS)
        self._round, self._calls = round, 0

    def reduce(self, *arguments):
        self._calls += 1
        return super().reduce(*arguments)

    def failure(self) -> str | None:
        late = self.parallel.rank == 1 and self._calls >= self._round
        return "rows of rank 0 did not arrive" if late else None


def giving_up(parallel: ParallelState) -> list:
    """What is said, and after how many calls of `reduce`: in the first round, and in a timed one."""
    found = []
    for round in (1, 5):
        dispatcher = GivesUp(parallel, round)
        with pytest.raises(RankError) as caught:
            time_dispatcher(dispatcher, 4, LIMITS, parallel, replays=2)
        found.append([str(caught.value), dispatcher._calls])
    return found


def timed_dispatchers(parallel: ParallelState) -> dict:
    found = {}
    for name in (n for n in DISPATCHERS if dispatcher_class(n).obstacle(parallel, LIMITS) is None):
        dispatcher = build(name, parallel, LIMITS)
        found[name] = [vars(time_dispatcher(dispatcher, rows, LIMITS, parallel, replays=2)) for rows in ROWS]
        dispatcher.close()
    return {"times": found, "rounds": dict(parallel.meter.rounds)}


def gathered(parallel: ParallelState) -> list:
    return [gather_json({"ä" * parallel.rank: [parallel.rank, None]}, parallel), together(lambda: "x" * 9, parallel)]


def every_case(parallel: ParallelState) -> dict:
    return {
        "slow": slower_rank(parallel),
        "quick": quick_rank(parallel),
        "failing": failing_rank(parallel),
        "gathered": gathered(parallel),
        "dispatchers": timed_dispatchers(parallel),
        "giving up": giving_up(parallel),
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["ep1", "ep2"])
def world(request, tmp_path_factory) -> list[dict]:
    return on_ranks(2, tmp_path_factory.mktemp("world"), every_case, ep=request.param)


def test_all_ranks_return_the_slowest_median(world):
    first, second = world
    assert first["slow"] == second["slow"] and first["quick"] == second["quick"]
    assert first["slow"] > 5 * first["quick"] > 0


def test_a_failure_on_one_rank_is_every_ranks(world):
    expected = ["rank 1: OSError: the link is down", "rank 0: MemoryError: no room"]
    assert [one["failing"] for one in world] == [expected, expected]


def test_a_kernel_that_gave_up_is_a_failure_and_soon(world):
    reason = "rank 1: RuntimeError: rows of rank 0 did not arrive"
    for one in world:
        (first, at_once), (second, later) = one["giving up"]
        assert first == second == reason
        assert at_once == 1 and later > 5


def test_every_dispatcher_is_timed_alike_on_all_ranks(world):
    first, second = (one["dispatchers"] for one in world)
    assert first["times"] == second["times"] and {"reference", "allreduce", "nccl_a2a"} <= set(first["times"])
    for name, times in first["times"].items():
        for one in times:
            assert one["reduce"] > 0 and one["combine"] >= 0 and one["dispatch"] + one["combine"] > 0, name
    assert not any(first["rounds"].values()), "timing is no traffic of a step"


def test_a_rank_alone_times_too():
    alone = ParallelState()
    times = time_dispatcher(build("reference", alone, LIMITS), 4, LIMITS, alone)
    assert times.reduce > 0 and times.dispatch == 0 and times.layer == times.reduce + times.combine


def test_values_of_any_length_are_gathered(world):
    expected = [[{"": [0, None]}, {"ä": [1, None]}], ["x" * 9] * 2]
    assert [one["gathered"] for one in world] == [expected, expected]
