"""When a step counts as hung, whom that is put down to, and what counts as disagreement. Time is the test's own."""

from __future__ import annotations

import pytest

from engine.comm.step_watch import SILENT_START_SECONDS, START, STILL_LOAD_SECONDS, Patience, StepDigest, StepWatch

SAME = StepDigest(1, 4, 99)


class World:
    """Three ranks whose start is over."""

    def __init__(self, timeout: float = 10.0, started: bool = True):
        self.now = 100.0
        self.watch = StepWatch(3, Patience(timeout, 5000.0), lambda: self.now)
        self.watch.began(START)
        if started:
            self.finish(START)

    def finish(self, step: int, ranks: tuple[int, ...] = (0, 1, 2), digest: StepDigest | None = None) -> None:
        for rank in ranks:
            self.watch.finished(rank, step, digest)

    def pass_time(self, seconds: float, answering: tuple[int, ...] = (1, 2)) -> str | None:
        """Goes on in beats, in which the ranks say that they are where they were."""
        end = self.now + seconds
        verdict = None
        while self.now < end and verdict is None:
            self.now = min(self.now + 1.0, end)
            for rank in answering:
                self.watch.heard(rank, self.watch._ranks[rank].position)
            verdict = self.watch.verdict()
        return verdict and verdict.reason


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_fires_between_steps(world):
    assert world.pass_time(1e4, answering=()) is None
    world.watch.began(1)
    world.finish(1)
    assert world.pass_time(1e4, answering=()) is None and not world.watch.is_busy


def test_a_step_after_a_long_rest_has_its_whole_time(world):
    world.pass_time(1e4, answering=())
    world.watch.began(1)
    assert world.watch.verdict() is None
    assert world.pass_time(9.0) is None


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_rank_that_is_not_done_is_named(world, late):
    world.watch.began(1)
    world.finish(1, tuple({0, 1, 2} - {late}))
    assert world.pass_time(9.5) is None
    assert world.pass_time(2.0) == f"rank {late} hangs in step 1 for 10 s."


@pytest.mark.parametrize("late", [0, 1, 2])
def test_of_ranks_that_are_not_done_the_one_that_came_least_far_is_named(world, late):
    """The others wait for it in the next collective."""
    world.watch.began(1)
    for rank in range(3):
        world.watch.heard(rank, (1, 4 if rank == late else 5))
    assert world.pass_time(11.0) == f"rank {late} hangs in step 1 for 10 s."


def test_a_rank_that_never_began_the_step_is_named(world):
    """With overlap the others may have launched two steps more."""
    for step in (1, 2):
        world.watch.began(step)
        world.watch.heard(0, (step, 3))
        world.watch.heard(1, (step, 3))
        world.finish(1, (0, 1))
    assert world.pass_time(11.0) == "rank 2 hangs in step 1 for 10 s."


def test_ranks_that_came_equally_far_are_all_named(world):
    world.watch.began(1)
    for rank in (0, 1, 2):
        world.watch.heard(rank, (1, 5))
    assert world.pass_time(11.0) == "ranks 0, 1, 2 hang in step 1 for 10 s."


def test_a_slow_step_is_no_hang(world):
    """Each collective that a rank enters starts the time anew."""
    world.watch.began(1)
    for calls in range(20):
        assert world.pass_time(9.0) is None
        world.watch.heard(1, (1, calls + 1))


def test_a_stopped_process_is_noticed_earlier(world):
    world.watch.began(1)
    assert world.pass_time(3.9, answering=(1,)) is None
    assert world.pass_time(1.0, answering=(1,)) == "rank 2 does not respond in step 1."


def test_a_long_start_is_no_hang_but_no_process_may_be_silent():
    world = World(started=False)
    assert world.pass_time(3000) is None
    assert world.pass_time(SILENT_START_SECONDS - 1, answering=(2,)) is None
    assert world.pass_time(3, answering=(2,)) == "rank 1 does not respond in the start."


def test_a_start_without_an_end_is_one():
    world = World(started=False)
    world.finish(START, (0, 2))
    assert world.pass_time(5100) == "rank 1 hangs in the start for 5000 s."


class Load(World):
    """Three ranks at their weights, of which each has 10 GB."""

    def __init__(self):
        super().__init__(started=False)
        self.done = [1, 1, 1]
        self.read(0)

    def read(self, *ranks: int) -> None:
        for rank in ranks:
            self.done[rank] += 1
        self.watch.loaded([(done * 10**7, 10**10) for done in self.done])


def test_a_slow_load_is_no_hang_as_long_as_every_rank_reads_something():
    world = Load()
    for _ in range(200):
        assert world.pass_time(STILL_LOAD_SECONDS - 10) is None
        world.read(0, 1, 2)
    assert world.now > 10 * Patience().start
    assert world.pass_time(STILL_LOAD_SECONDS + 10) is not None


def test_a_rank_that_reads_nothing_is_named_though_others_read():
    world = Load()
    for _ in range(10):
        world.read(0, 2)
        reason = world.pass_time(30.5)
    words = "rank 1 has read nothing for 300 s while reading weights, at 0.01 of 10.00 GB; look at the disk that holds"
    assert reason == f"{words} them."
    assert world.watch.verdict().ranks == (1,)


def test_ranks_that_stand_still_alike_are_all_named():
    reason = Load().pass_time(1000)
    assert reason.startswith("ranks 0, 1, 2 have read nothing for 300 s") and "0.02 of 10.00, 0.01 of 10.00," in reason


def test_a_rank_that_waits_for_a_slow_one_is_not_at_fault():
    """Because it has all that it wants, or in a collective where ranks read together."""
    world = Load()
    world.done[0] = 1000
    world.read()
    world.watch.heard(2, (START, 7))
    for _ in range(20):
        world.read(1)
        assert world.pass_time(200) is None
    assert world.pass_time(1000).startswith("rank 1 has read nothing")


def test_a_rank_that_is_ahead_of_those_that_have_all_is_named():
    """Its expert group has more to exchange than theirs, so that they have entered fewer collectives, and wait."""
    world = Load()
    world.done[0] = world.done[2] = 1000
    world.read()
    world.watch.heard(1, (START, 7.5))
    assert world.pass_time(1000).startswith("rank 1 has read nothing")


def test_once_all_is_read_a_start_has_its_whole_time_again():
    world = Load()
    world.done = [1000, 1000, 1000]
    world.read()
    assert world.pass_time(4990) is None
    assert world.pass_time(20) == "ranks 0, 1, 2 hang in the start for 5000 s."


def test_a_load_is_not_waited_for_longer_than_a_start():
    assert Patience(start=7.0).load == 7.0 and Patience().load == STILL_LOAD_SECONDS < Patience().start


def test_a_rank_whose_program_is_elsewhere_is_waited_for(world):
    """Under torchrun a script may come to its next call later than rank 0's."""
    world.watch.began(1)
    world.watch.heard(0, (1, 5))
    world.watch.heard(2, None)
    for _ in range(100):
        world.now += 1.0
        world.watch.heard(1, (1, 5))
        assert world.watch.verdict() is None
    world.watch.heard(2, (1, 0))
    assert world.pass_time(9.5) is None
    assert world.pass_time(1.0) == "rank 2 hangs in step 1 for 10 s."


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (StepDigest(1, 5, 99), "it scheduled 5 tokens, rank 0 4"),
        (StepDigest(2, 4, 99), "it scheduled 2 requests, rank 0 1"),
        (StepDigest(1, 4, 98), "it sampled other tokens than rank 0"),
    ],
)
@pytest.mark.parametrize("order", [(0, 2), (2, 0)], ids=["after", "before"])
def test_a_rank_that_disagrees_is_named_whoever_answers_first(world, theirs, words, order):
    world.watch.began(57)
    world.finish(57, (1,), SAME)
    for rank in order:
        world.finish(57, (rank,), theirs if rank == 2 else SAME)
    verdict = world.watch.verdict()
    assert (verdict.reason, verdict.ranks) == (f"rank 2 disagrees at step 57: {words}.", ())


def test_agreement_is_forgotten_and_steps_are_compared_apart(world):
    for step in range(1, 200):
        world.watch.began(step)
        world.finish(step, digest=StepDigest(1, step, step))
    assert world.watch.verdict() is None and not world.watch._digests
