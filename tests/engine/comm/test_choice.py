"""Dispatchers are chosen by measuring, and all ranks choose what rank 0 does."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine.comm import choice, choice_measure
from engine.comm.choice import DispatcherChoice, candidates, measured_sizes, shards_tokens
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes
from engine.log import logger
from tests.gloo_ranks import on_ranks

LIMITS = DispatchLimits(num_experts=8, width=32, top_k=3, max_tokens=256, dtype=torch.float32)
SIZES = [1, 2, 64, 128, 256]
RIVALS = ["reference", "allreduce"]


def test_auto_takes_dispatchers_that_exist():
    found = [candidates("auto", ParallelState(tp=tp), LIMITS) for tp in (1, 2)]
    assert found == [["reference"], ["allreduce"]]
    assert candidates("auto", ParallelState(tp=8, is_share=True), LIMITS) == ["reference"]
    assert [candidates(name, ParallelState(tp=2), LIMITS) for name in DISPATCHERS] == [[name] for name in DISPATCHERS]


def test_auto_on_gpus_takes_what_replicates_tokens_and_can_run(monkeypatch):
    gpu = ParallelState(tp=2, ep=2, device=torch.device("cuda", 0))
    able = [n for n in DISPATCHERS if not shards_tokens(n) and dispatcher_class(n).obstacle(gpu, LIMITS) is None]
    assert candidates("auto", gpu, LIMITS) == [name for name in able if name != "reference"]
    monkeypatch.setattr(dispatcher_class("allreduce"), "obstacle", classmethod(lambda *_: "needs a link"))
    assert "allreduce" not in candidates("auto", gpu, LIMITS)


def test_only_named_dispatchers_shard_tokens():
    assert not shards_tokens("auto") and not shards_tokens("allreduce") and shards_tokens("nccl_a2a")


@pytest.mark.parametrize(
    ("buckets", "most", "expected"),
    [
        ([1, 2, 4, 6], 2048, [1, 2, 4, 6, 64, 128, 256, 512, 1024, 2048]),
        ([1, 2, 4, 8, 16, 32, 64, 96], 300, [1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 300]),
        ([1, 2, 3], 48, [1, 2, 3, 48]),
        ([1], 64, [1, 64]),
        ([1, 2, 4], 4, [1, 2, 4]),
    ],
)
def test_sizes_hold_the_buckets_the_invariant_range_and_the_largest_step(buckets, most, expected):
    assert measured_sizes(buckets, most) == expected


def test_one_candidate_is_not_measured():
    one = DispatcherChoice("auto", ParallelState(), LIMITS, SIZES, "off", measure=None)
    assert one.name == "reference" and one.for_rows(7).name == "reference"
    assert one.report() == {"microseconds": {}, "chosen": dict.fromkeys(SIZES, "reference"), "rounds": {}}
    one.close()


def test_a_named_dispatcher_that_cannot_run_is_an_error(monkeypatch):
    monkeypatch.setattr(dispatcher_class("allreduce"), "obstacle", classmethod(lambda *_: "needs a link"))
    with pytest.raises(ValueError, match="moe_comm='allreduce' needs a link"):
        DispatcherChoice("allreduce", ParallelState(), LIMITS)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def chosen_by(parallel: ParallelState, measure, cache: str = "off", sizes=SIZES) -> dict:
    """Chooses between two dispatchers as on a GPU; what a rank saw."""
    choice.candidates = lambda *_: RIVALS
    log = Lines()
    made = DispatcherChoice("auto", parallel, LIMITS, sizes, cache, measure)
    logger.removeHandler(log)
    used = [made.for_rows(rows).name for rows in (1, 3, 64, 65, 129, 256, 9999)]
    return made.report() | {"used": used, "log": log.lines, "name": made.name}


def by_own_clock(parallel: ParallelState, cache: str, kept: bool) -> dict:
    """Each rank's clock would choose otherwise: rank 1 is slower at what rank 0 is fast at."""
    calls = []

    def measure(dispatcher, rows: int) -> RoundTimes:
        calls.append(rows)
        fast = (dispatcher.name == "reference") == (rows <= 64)
        return RoundTimes((3e-6 if fast else 9e-6) / (1 + parallel.rank), 1e-6, 1e-6 * rows)

    found = chosen_by(parallel, measure, cache)
    assert bool(calls) != kept
    return found


def failing(parallel: ParallelState) -> dict:
    """`reference` would be faster, but rank 1 cannot run it with 64 rows."""

    def measure(dispatcher, rows: int) -> RoundTimes:
        if dispatcher.name == "reference" and parallel.rank == 1 and rows == 64:
            raise RuntimeError("peer access is refused")
        return RoundTimes(1e-6 if dispatcher.name == "reference" else 5e-6, 0.0, 0.0)

    return chosen_by(parallel, measure)


def all_failing(parallel: ParallelState) -> dict:
    def measure(dispatcher, rows: int) -> RoundTimes:
        raise RuntimeError("no clock")

    return chosen_by(parallel, measure)


def not_built(parallel: ParallelState) -> dict:
    """Rank 1 is refused the memory of `reference`."""
    build = choice_measure.dispatchers.build

    def refuse(name, *arguments):
        if name == "reference" and parallel.rank == 1:
            raise OSError("no memory to share")
        return build(name, *arguments)

    choice_measure.dispatchers.build = refuse
    found = chosen_by(parallel, None, sizes=[2])
    choice_measure.dispatchers.build = build
    return found


def every_case(parallel: ParallelState, cache: str) -> dict[str, dict]:
    return {
        "first": by_own_clock(parallel, cache, False),
        "again": by_own_clock(parallel, cache, True),
        "failing": failing(parallel),
        "all failing": all_failing(parallel),
        "not built": not_built(parallel),
        "in truth": chosen_by(parallel, None, sizes=[2]),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache") / "made by the first"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, cache) -> dict[str, list[dict]]:
    """Case -> what each of two ranks saw."""
    of_ranks = on_ranks(2, tmp_path_factory.mktemp("world"), every_case, str(cache))
    return {case: [rank[case] for rank in of_ranks] for case in of_ranks[0]}


def without_log(outcome: dict) -> dict:
    return {key: value for key, value in outcome.items() if key != "log"}


def test_both_ranks_chose_the_same(outcomes):
    for case, (one, other) in outcomes.items():
        assert without_log(one) == without_log(other), case


def test_the_choice_is_that_of_rank_0s_clock(outcomes):
    first = outcomes["first"][0]
    assert first["chosen"] == {1: "reference", 2: "reference", 64: "reference", 128: "allreduce", 256: "allreduce"}
    assert first["used"] == ["reference"] * 3 + ["allreduce"] * 4 and first["name"] == "reference, allreduce"
    assert first["microseconds"][2] == pytest.approx({"reference": 6.0, "allreduce": 12.0})
    assert first["rounds"][128] == pytest.approx({"reduce": 3.0, "dispatch": 1.0, "combine": 128.0})
    table = "\n".join(first["log"])
    assert "6.0*" in table and "12.0 " in table and "allreduce" in table
    assert not outcomes["first"][1]["log"], "rank 0 speaks for all"


def test_a_later_start_takes_what_was_kept(outcomes, cache):
    again = outcomes["again"][0]
    assert without_log(again) == without_log(outcomes["first"][0])
    assert str(cache) in "\n".join(again["log"])


def test_what_fails_on_one_rank_is_dropped_by_all(outcomes):
    same = outcomes["failing"][0]
    assert set(same["chosen"].values()) == {"allreduce"} and same["name"] == "allreduce"
    assert all(list(row) == ["allreduce"] for row in same["microseconds"].values())
    for outcome in outcomes["failing"]:
        assert any("rank 1: RuntimeError: peer access is refused" in line for line in outcome["log"])


def test_without_any_measurement_the_baseline_is_used(outcomes):
    same = outcomes["all failing"][0]
    assert set(same["chosen"].values()) == {"allreduce"} and same["microseconds"] == {} == same["rounds"]


def test_what_one_rank_cannot_build_is_dropped_by_all(outcomes):
    assert outcomes["not built"][0]["name"] == "allreduce"
    for outcome in outcomes["not built"]:
        assert any("rank 1: OSError: no memory to share" in line for line in outcome["log"])


def test_two_processes_measure_and_choose(outcomes):
    same = outcomes["in truth"][0]
    assert list(same["chosen"]) == [2] and set(same["chosen"].values()) <= set(RIVALS)
    assert all(t > 0 for row in same["microseconds"].values() for t in row.values())
