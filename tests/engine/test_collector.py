"""A process that serves does not look through its engine again and again."""

import gc

from engine.collector import spare_the_engine
from engine.worker import follow


class Cycle:
    def __init__(self):
        self.me = self


class Ended:
    """A follower whose engine ends at once, and its ranks."""

    num_frozen = 0

    def follow(self):
        self.num_frozen = gc.get_freeze_count()

    def close(self):
        pass


def test_what_is_there_is_spared_and_what_comes_later_is_not():
    kept = [Cycle() for _ in range(100)]
    try:
        spare_the_engine()
        frozen = gc.get_freeze_count()
        assert frozen > len(kept)
        for _ in range(50):
            Cycle()
        assert gc.collect() >= 50 and gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_a_rank_that_follows_is_spared_too():
    before, ended = gc.get_freeze_count(), Ended()
    try:
        assert follow(ended, ended) == 0
        assert ended.num_frozen > before
    finally:
        gc.unfreeze()
