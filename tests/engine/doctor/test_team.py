"""What a leader says of ranks that end or are stuck, over a store of its own."""

import json
import sys
import time

import pytest
import torch.distributed as dist

from engine.doctor.keys import AT, FAILED, RESULT, part
from engine.doctor.settings import Settings
from engine.doctor.team import Leader, Outcome, Supervisor, World


class Silent(Supervisor):
    """Its ranks only note that they were started or ended; `on_start` plays what they do."""

    def __init__(self, tp: int, on_start=lambda store, index, world: None):
        super().__init__(dist.HashStore(), "127.0.0.1:1", range(tp), Settings(tp, 1, "cpu", seconds=60))
        self.on_start, self.ended = on_start, []

    def start(self, index, world):
        self.on_start(part(self.store, index), index, world)

    def end(self, index):
        self.ended.append(index)


def lead(tp: int, on_start, *worlds: World, seconds: float = 60.0) -> tuple[dict[str, Outcome], Silent]:
    supervisor = Silent(tp, on_start)
    return Leader(supervisor, time.monotonic() + seconds).run(worlds), supervisor


def answer(store, number: int, value: object) -> None:
    store.set(RESULT.format(number), json.dumps({"value": value}))


def test_outcomes_carry_the_environment_they_were_measured_in():
    def work(store, index, world):
        for number, name in enumerate(world.probes):
            answer(store, number, f"{name} of world {index}")

    outcomes, supervisor = lead(2, work, World(("a", "b")), World(("a",), {"NCCL_ALGO": "Ring", "B": "1"}))
    assert {key: one.value for key, one in outcomes.items()} == {
        "a": "a of world 0",
        "b": "b of world 0",
        "B=1 NCCL_ALGO=Ring: a": "a of world 1",
    }
    assert supervisor.ended == [0, 1]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({0: "1", 1: "1", 2: "1"}, "all ranks were in it and none finished within 0.05 s"),
        ({0: "1", 1: "0", 2: "1"}, "rank 1 did not get there within 0.05 s"),
        ({0: "0", 1: "1", 2: "0"}, "ranks 0, 2 did not get there within 0.05 s"),
        ({0: "1", 1: "-1"}, "rank 2 did not get there within 0.05 s"),
    ],
)
def test_stuck_ranks_are_named_and_the_rest_is_tried_again(places, said):
    def work(store, index, world):
        answer(store, 0, "fine")
        if index == 0:
            for rank, place in places.items():
                store.set(AT.format(rank), place)

    outcomes, supervisor = lead(3, work, World(("first", "stuck", "later"), probe_seconds=0.05))
    assert outcomes["stuck"] == Outcome(failed=said, ended_world=True)
    assert outcomes["later"].value == "fine"  # the first probe of the second world
    assert supervisor.ended == [0, 1]


def test_rank_that_was_killed_is_named_before_those_that_fail_for_want_of_it():
    def work(store, index, world):
        store.set(FAILED.format(0), "RuntimeError: connection closed by peer")
        store.set(FAILED.format(2), "was killed by signal 9")

    outcomes, _ = lead(3, work, World(("first", "later")))
    assert outcomes["first"].failed == "rank 2: was killed by signal 9"
    assert outcomes["later"].failed == "not tried: rank 2: was killed by signal 9"


def test_time_that_is_used_up_ends_the_run():
    outcomes, _ = lead(1, lambda *_: None, World(("a", "b")), World(("c",), {"X": "1"}), seconds=0.0)
    assert {one.failed for one in outcomes.values()} == {"not tried: the 60 s of the run were used up"}
    assert set(outcomes) == {"a", "b", "X=1: c"}


def test_a_process_that_ends_badly_is_reported(monkeypatch):
    supervisor = Supervisor(dist.HashStore(), "127.0.0.1:1", [0, 1], Settings(2, 1, "cpu"))
    monkeypatch.setattr(
        supervisor,
        "_command",
        lambda index, rank, world: [
            sys.executable,
            "-c",
            f"import sys; rank = {rank}; rank and sys.exit('no such module')",
        ],
    )
    supervisor.start(0, World(("a",)))
    leader = Leader(supervisor, time.monotonic() + 30)
    assert leader._wait(0, 0, 30).failed == "rank 1: ended with exit code 1 (no such module)"
    supervisor.end_all()
