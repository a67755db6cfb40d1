"""How the rows of a long step are cut into rounds over peer memory."""

from __future__ import annotations

import pytest

from engine.comm.exchange import Rounds


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 15, 16, 17, 40, 51])
def test_rounds_hold_every_row_once(num_rows, ranks):
    """Of all ranks together; none has more places than it says, and pieces fit."""
    capacity = 16
    rounds = Rounds(num_rows, capacity, ranks)
    seen = []
    for rank in range(ranks):
        places = []
        for rows, place in rounds.rows_of(rank):
            assert rows.stop - rows.start == place.stop - place.start
            seen += range(rows.start, rows.stop)
            places += range(place.start, place.stop)
        assert len(set(places)) == len(places) and all(0 <= p < rounds.num_own for p in places)
    assert sorted(seen) == list(range(num_rows))
    assert all(piece.stop - piece.start <= capacity for piece in rounds.pieces)
    assert all(share <= capacity // ranks for share in rounds.shares)


def test_own_rows_of_a_piece_lie_together():
    """17 rows of 4 ranks, 8 at a time: 2 + 2 + 1 own rows, and what dispatch brings is theirs times the ranks."""
    rounds = Rounds(17, 8, 4)
    assert rounds.pieces == [slice(0, 8), slice(8, 16), slice(16, 17)]
    assert rounds.own() == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert rounds.received() == [slice(0, 8), slice(8, 16), slice(16, 20)]
    assert list(rounds.rows_of(3)) == [
        (slice(6, 8), slice(0, 2)), (slice(14, 16), slice(2, 4)), (slice(17, 17), slice(4, 4)),
    ]  # fmt: skip
    assert not Rounds(0, 8, 4).pieces
