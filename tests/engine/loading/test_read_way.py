import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.loading.read_way import LEAST_BYTES, TRIAL_BYTES, TRIALS, ReadWay

PIECE = TRIAL_BYTES // 16


def read_all(way: ReadWay, total_bytes: int, seconds: dict[bool, int]) -> list[bool]:
    """Which way each piece goes, where a piece takes `seconds` by the way it goes."""
    ways = []
    for _ in range(total_bytes // PIECE):
        ways.append(way.is_direct(PIECE))
        way.tell(ways[-1], PIECE, seconds[ways[-1]])
    return ways


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_both_ways_are_tried_by_turns_and_the_faster_stays(cached, direct):
    way = ReadWay(LEAST_BYTES)
    ways = read_all(way, LEAST_BYTES, {False: cached, True: direct})
    trials = ways[: 16 * len(TRIALS)]
    assert trials == [trial for trial in TRIALS for _ in range(16)]
    assert set(ways[len(trials) :]) == {direct <= cached}


def test_few_bytes_are_not_worth_a_trial():
    assert all(read_all(ReadWay(LEAST_BYTES - 1), LEAST_BYTES - 1, {False: 1, True: 10}))


@pytest.mark.parametrize("told", [True, False])
def test_where_one_way_was_never_told_of_the_other_is_no_worse(told):
    """As where a file system refuses O_DIRECT, or where all that was tried through the page cache was there already."""
    way = ReadWay(LEAST_BYTES)
    for _ in range(LEAST_BYTES // PIECE):
        is_direct = way.is_direct(PIECE)
        if is_direct == told:
            way.tell(is_direct, PIECE, 1.0)
    assert way.direct_is_faster
