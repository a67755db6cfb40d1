"""How far all ranks are, by a store that is a dict and a clock that is set."""

from __future__ import annotations

import pytest

from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.loading.progress import CHECKING, MEASURING, READING, LoadProgress
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from models.kimi_k25 import weights
from tests.checkpoints import SMALL, build_checkpoint


class DictStore(dict):
    """The part of torch's stores that is used."""

    num_sets = 0

    def set(self, key, value):
        self.num_sets += 1
        self[key] = value.encode()

    def get(self, key):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)

    def clone(self):
        return self


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def world(clock, size: int, expected: int = 100) -> list[LoadProgress]:
    """One progress a rank, over one store; each expects `expected` bytes."""
    store, ranks = DictStore(), [LoadProgress(clock) for _ in range(size)]
    for rank, progress in enumerate(ranks):
        progress.join(rank, size, store)
        progress.expect(expected)
    return ranks


def test_rank_0_knows_the_bytes_of_all(clock):
    ranks = world(clock, 4)
    clock.now = 10.0
    for rank, progress in enumerate(ranks):
        progress.add(50 + rank)
    ranks[0].poll()
    shot = ranks[0].snapshot()
    assert [share.done for share in shot.shares] == [50, 51, 52, 53]
    assert (shot.done, shot.total, shot.percent, shot.rate) == (206, 400, 51, 20.6)
    assert shot.seconds_left == pytest.approx(10.0), "of the slowest rank, which has done half of its share"
    assert (shot.phase, shot.behind, shot.is_complete) == (READING, None, False)


def test_a_rank_alone_needs_no_store(clock):
    progress = LoadProgress(clock)
    assert progress.snapshot().phase == CHECKING and progress.snapshot().words().startswith("0.00 of 0.00 GB")
    progress.join(0, 1, None)
    progress.expect(10 * 10**9)
    clock.now = 5.0
    progress.add(5 * 10**9)
    progress.poll()
    assert progress.snapshot().words() == "5.00 of 10.00 GB (50 %), 1.00 GB/s, 5 s left"
    clock.now = 10.0
    progress.add(5 * 10**9)
    progress.enter(MEASURING)
    clock.now = 60.0
    assert progress.snapshot().summary() == "10.00 GB in 10.0 s, 1.00 GB/s", "time stands still once all is read"


def test_the_rank_that_the_others_wait_for_is_named(clock):
    ranks = world(clock, 3)
    clock.now = 4.0
    for progress, done in zip(ranks, (80, 40, 90), strict=True):
        progress.add(done)
    ranks[0].poll()
    assert ranks[0].snapshot().words().endswith("6 s left; rank 1 is behind, at 40 %")


def test_a_rank_that_stands_still_is_named_with_its_seconds(clock):
    ranks = world(clock, 2)
    for second in (2.0, 4.0, 6.0, 8.0):
        clock.now = second
        ranks[0].add(1)
        ranks[0].poll()
    assert ranks[0].snapshot().words().endswith("? s left; rank 1 has read nothing for 6 s, at 0 %")
    ranks[1].add(4)
    ranks[0].poll()
    assert ranks[0].snapshot().behind is None


def test_a_rank_that_has_not_begun_counts_as_the_others_do(clock):
    ranks = [LoadProgress(clock) for _ in range(2)]
    for rank, progress in enumerate(ranks):
        progress.join(rank, 2, DictStore())
    ranks[0].expect(100)
    ranks[0].add(100)
    ranks[0].poll()
    shot = ranks[0].snapshot()
    assert (shot.total, shot.percent, shot.behind, shot.is_complete) == (200, 50, 1, False)


class Meeting(DictStore):
    """Rank 1 has read all of its own when rank 0 asks for the third time."""

    num_checks = 0

    def check(self, keys):
        self.num_checks += 1
        if self.num_checks == 3:
            self.set("turnout/load/all is read/1", "1")
        return super().check(keys)


def test_ranks_wait_for_the_one_that_reads_last(clock):
    store, progress = Meeting(), LoadProgress(clock)
    progress.join(0, 2, store)
    progress.meet("all is read")
    assert store.num_checks == 3 and "turnout/load/all is read/0" in store
    last = LoadProgress(clock)
    last.join(1, 2, store)
    last.meet("all is read")
    assert store.num_checks == 4, "the last need not wait"


def test_nobody_waits_for_a_rank_that_has_failed(clock):
    progress = LoadProgress(clock)
    progress.join(0, 2, DictStore(), lambda: "rank 1 ended without a word")
    with pytest.raises(EngineDeadError, match="rank 1 ended without a word"):
        progress.meet("all is read")


class Met(Exception):
    pass


class Noting(LoadProgress):
    def __init__(self, moments: list[str]):
        super().__init__()
        self.moments = moments

    def meet(self, moment):
        self.moments.append(moment)
        if moment == "model and draft are read":
            raise Met


@pytest.mark.parametrize("prepared", [None, "prepared"])
def test_no_collective_is_entered_before_all_ranks_have_read(tmp_path, monkeypatch, prepared):
    """There is no process group here, so that any other would raise."""
    moments, directory = [], str(build_checkpoint(tmp_path / "small", SMALL))
    monkeypatch.setattr(weights, "agree_on_minimum", lambda value, _: moments.append("collective") or value)
    settings = {"device": "cpu", "dtype": "float32", "prepared_weights": prepared and str(tmp_path / prepared)}
    config, progress = EngineConfig(directory, tp=2, ep=2, **settings), Noting(moments)
    with pytest.raises(Met):
        ModelRunner(config, ModelFiles.read(config), ParallelState(0, 2, 2), None, progress)
    first = ["prepared weights are read", "collective", "the model is read", "collective"] if prepared else []
    assert progress.snapshot().is_complete and moments == [*first, "model and draft are read"]


def test_the_store_is_written_a_few_times_a_second_and_at_the_end(clock):
    store, progress = DictStore(), LoadProgress(clock)
    progress.join(1, 2, store)
    progress.expect(1000)
    for millisecond in range(1000):
        clock.now = millisecond / 1000
        progress.add(1)
    assert 4 <= store.num_sets <= 6
    assert store["turnout/load/1"] == b"1000 1000"


def test_a_draft_adds_to_what_is_expected(clock):
    (progress,) = world(clock, 1)
    progress.add(100)
    assert progress.snapshot().is_complete
    progress.expect(60)
    assert not progress.snapshot().is_complete
    assert progress.snapshot().as_dict() == {
        "phase": READING, "bytes_done": 100, "bytes_total": 160, "percent": 62, "gb_per_second": 0.0,
        "seconds_left": 0.0, "rank_behind": None,
    }  # fmt: skip
