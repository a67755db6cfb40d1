"""Ranks that stay between calls, and what a rank that dies leaves behind."""

from __future__ import annotations

import pytest

from benchmarks.rank_team import RankTeam

COUNTER = """
class Counter:
    def __init__(self, parallel, start):
        self.value, self.rank = start, parallel.rank

    def add(self, number):
        if number < 0:
            raise ValueError(f"rank {self.rank} counts upwards")
        self.value += number
        return {"rank": self.rank, "value": self.value}

    def close(self):
        with open(CLOSED, "w") as file:
            file.write("closed")
"""


def test_what_ranks_made_stays_until_one_dies_and_is_then_made_anew(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    (tmp_path / "counter_of_ranks.py").write_text(f"CLOSED = {str(closed)!r}\n{COUNTER}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with RankTeam("counter_of_ranks:Counter", {"start": 10}, 1, 1, "cpu") as team:
        assert team.call("add", {"number": 1}, 60) == [{"rank": 0, "value": 11}]
        assert team.call("add", {"number": 2}, 60) == [{"rank": 0, "value": 13}]
        with pytest.raises(RuntimeError, match=r"add: rank 0 ended(.|\n)*ValueError: rank 0 counts upwards"):
            team.call("add", {"number": -1}, 60)
        assert not closed.exists()
        assert team.call("add", {"number": 5}, 60) == [{"rank": 0, "value": 15}]
    assert closed.read_text() == "closed"


def test_ranks_that_take_too_long_are_ended(monkeypatch):
    team = RankTeam("counter_of_ranks:Counter", {}, 2, 1, "cpu")
    with pytest.raises(RuntimeError, match="add: not done in time"):
        team.call("add", {"number": 1}, 0.0)
    assert team._ranks == [] and team._directory is None


def test_a_team_that_was_never_called_starts_nothing(monkeypatch):
    monkeypatch.setattr("benchmarks.ranks.start", lambda *_: pytest.fail("a rank was started"))
    with RankTeam("no_module:Nothing", {}, 8, 8, "cpu") as team:
        pass
    assert team._ranks == []
