"""Greedy answers with drafts of every kind are those of plain decoding: a sample of `benchmarks/equality.py`."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import equality
from benchmarks.equality import Asked, Difference, Engines, Setting, differences, measure, requests, shares, waves
from engine import verify
from engine.config import TINY_CHECKPOINT
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft

CHUNK = equality.CHUNK
MIXED = [
    Setting("random", 3, adaptive=True),
    Setting("random", 5, budget=CHUNK),
    Setting("wrong", 2),
    Setting("wrong", 5, budget=CHUNK),
    Setting("right", 7),
    Setting("right", 3, budget=17),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Engines:
    directory = tmp_path_factory.mktemp("equality")
    shape = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)
    draft = write_draft(directory / "draft", shape, layer_ids=(0, 1, 2))
    return Engines(str(build_checkpoint(directory / "model", SMALL)), "cpu", {"random": str(draft)})


def asked_of_small(count: int) -> list[Asked]:
    return requests(count, 14, 300)


def test_no_draft_changes_a_token(engines):
    """Waves of 1 and of 64, chunks, aborts, arrivals in between."""
    rows, different = measure(engines, MIXED, asked_of_small(120), 0)
    assert different == []
    assert sum(row["answers"] for row in rows) == 3 * 120 and all(row["aborted"] for row in rows)
    for row in rows:
        share = row["accepted"] / row["guesses"]
        assert share > 0.6 if row["draft"] == "right" else share < 0.2, row


def test_the_trained_draft_changes_no_token():
    engines = Engines(str(TINY_CHECKPOINT), "cpu", {"trained": "auto"})
    rows, different = measure(engines, [Setting("trained", 3, budget=CHUNK)], requests(9, 12, 4096, seed=3), 0)
    assert different == [] and rows[0]["accepted"] > 10


def test_no_draft_changes_a_token_over_a_cache_in_bytes(engines):
    over_bytes = Engines(engines.model, "cpu", engines.drafts, "fp8")
    rows, different = measure(over_bytes, [MIXED[0], MIXED[4]], asked_of_small(40), 0)
    assert different == [] and rows[1]["accepted"] > 100


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks(engines, world):
    rows, different = measure(engines, [Setting("random", 3, world=world)], asked_of_small(12), 12)
    assert different == [] and rows[0]["guesses"] > 0


@pytest.mark.slow
def test_the_whole_run():
    assert equality.main(["--tokens", "16"]) == 0


def test_a_planted_fault_is_seen_and_scored(engines, monkeypatch):
    """Every guess is accepted, right or not."""
    accept = verify.accept

    def planted(tokens_M, rows, state):
        guesses_NK = rows.guesses_NK.clone()
        tokens_NW = tokens_M.view(len(guesses_NK), -1)
        width = min(tokens_NW.shape[1], guesses_NK.shape[1])
        there_NK = guesses_NK[:, :width] != verify.NO_GUESS
        guesses_NK[:, :width] = tokens_NW[:, :width].where(there_NK, guesses_NK[:, :width])
        return accept(tokens_M, rows._replace(guesses_NK=guesses_NK), state)

    monkeypatch.setattr(verify, "accept", planted)
    rows, different = measure(engines, [Setting("wrong", 2)], asked_of_small(8), 0)
    assert rows[0]["different"] == len(different) > 4
    assert rows[0]["largest gap"] == max(d.gap for d in different) > 0


def test_differences_are_found_and_the_ends_of_answers_too():
    asked = [Asked([1], 9), Asked([1], 9, aborted=2), Asked([1], 9), Asked([1], 9)]
    expected = [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
    assert differences(expected, [[1, 2, 3], [1, 2], [4, 5], [4, 5]], asked) == []
    found = differences(expected, [[1, 9, 3], [1, 3], [4], [4, 5, 6]], asked)
    assert found == [
        Difference(0, 1, 2, 9),
        Difference(1, 1, 2, 3),
        Difference(2, 1, 5, None),
        Difference(3, 2, None, 6),
    ]


def test_gaps_are_of_the_two_tokens_behind_the_text_before_them(engines):
    core, close = engines.start(None)
    asked = [Asked([5, 6], 4)]
    expected = equality.plain_answers(core, asked)
    gaps = [
        equality.score(core, Difference(0, place, expected[0][place], expected[0][place]), expected, asked).gap
        for place in range(3)
    ]
    far = equality.score(core, Difference(0, 1, expected[0][1], None), expected, asked)
    close()
    assert gaps == [0.0] * 3 and far.gap == float("inf")


def test_each_draft_sees_every_request_in_waves_of_1_to_64():
    asked = asked_of_small(500)
    seen: dict[str, list[int]] = {}
    for setting, indices in shares(list(equality.SETTINGS), asked):
        seen.setdefault(setting.draft, []).extend(indices)
    assert set(seen) == {"trained", "random", "wrong", "right"}
    assert all(sorted(indices) == list(range(500)) for indices in seen.values())
    sizes = [len(places) for places in waves(asked)]
    assert sum(sizes) == 500 and {1, 64} <= set(sizes)
    assert list(itertools.chain(*waves(asked))) == list(range(500))
