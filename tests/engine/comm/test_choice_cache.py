"""What was measured is kept in a file, and only a whole and fitting file is believed."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from engine.comm.choice_cache import ChoiceCache, default_directory, fingerprint
from engine.comm.dispatcher import DispatchLimits
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes

LIMITS = DispatchLimits(num_experts=8, width=32, top_k=3, max_tokens=16, dtype=torch.bfloat16)
NAMES, SIZES = ["allreduce", "reference"], [1, 16]
MEASURED = {name: {s: RoundTimes(1e-6 * s, 0.0, 1 / 3e5) for s in SIZES} for name in NAMES}


def key_of(names=NAMES, sizes=SIZES, limits=LIMITS, parallel=None) -> dict:
    return fingerprint(names, sizes, limits, parallel or ParallelState())


@pytest.fixture
def kept(tmp_path) -> Path:
    ChoiceCache(str(tmp_path)).store(key_of(), MEASURED)
    return next(tmp_path.iterdir())


def test_what_was_kept_comes_back_to_the_bit(kept):
    assert ChoiceCache(str(kept.parent)).load(key_of()) == MEASURED
    assert [file.suffix for file in kept.parent.iterdir()] == [".json"], "nothing half-written is left"


def test_a_part_of_the_dispatchers_may_be_kept(tmp_path):
    cache = ChoiceCache(str(tmp_path))
    cache.store(key_of(), {"reference": MEASURED["reference"]})
    assert cache.load(key_of()) == {"reference": MEASURED["reference"]}


@pytest.mark.parametrize(
    "other",
    [
        {"names": ["allreduce"]},
        {"sizes": [1, 32]},
        {"limits": DispatchLimits(8, 64, 3, 16, torch.bfloat16)},
        {"limits": DispatchLimits(8, 32, 3, 16, torch.float32)},
        {"parallel": ParallelState(tp=4, ep=2, is_share=True)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_another_engine_has_another_file(kept, other):
    assert key_of(**other) != key_of()
    assert ChoiceCache(str(kept.parent)).load(key_of(**other)) is None


def test_settings_of_nccl_are_part_of_the_key(monkeypatch):
    before = key_of()
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert key_of() != before


def without(kept: dict, *path: str) -> str:
    place = kept
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    return json.dumps(kept)


def changed(kept: dict, value) -> str:
    kept["seconds"]["allreduce"]["1"] = value
    return json.dumps(kept)


DAMAGES = {
    "empty": lambda kept: "",
    "half written": lambda kept: json.dumps(kept)[:-40],
    "no object": lambda kept: "[1, 2]",
    "deep": lambda kept: "[" * 100_000,
    "not text": lambda kept: "\udcff",
    "foreign": lambda kept: json.dumps({"key": {"schema": 0}, "seconds": kept["seconds"]}),
    "no times": lambda kept: without(kept, "seconds"),
    "empty times": lambda kept: json.dumps(kept | {"seconds": {}}),
    "unknown dispatcher": lambda kept: json.dumps(kept | {"seconds": {"other": kept["seconds"]["allreduce"]}}),
    "a size is missing": lambda kept: without(kept, "seconds", "allreduce", "16"),
    "two numbers": lambda kept: changed(kept, [1e-6, 2e-6]),
    "no numbers": lambda kept: changed(kept, ["fast"] * 3),
    "negative": lambda kept: changed(kept, [1e-6, -2e-6, 2e-6]),
    "not a number": lambda kept: changed(kept, [float("nan"), 0.0, 1e-6]),
    "endless": lambda kept: changed(kept, [float("inf"), 0.0, 1e-6]),
    "nothing": lambda kept: changed(kept, [0.0, 0.0, 0.0]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_replaced(kept, caplog, damage):
    kept.write_bytes(DAMAGES[damage](json.loads(kept.read_text())).encode(errors="surrogateescape"))
    cache = ChoiceCache(str(kept.parent))
    assert cache.load(key_of()) is None
    assert str(kept) in caplog.text and "measured again" in caplog.text
    cache.store(key_of(), MEASURED)
    assert cache.load(key_of()) == MEASURED


def test_no_file_is_nothing_to_speak_of(tmp_path, caplog):
    assert ChoiceCache(str(tmp_path / "none")).load(key_of()) is None
    assert not caplog.records


@pytest.mark.parametrize("blocked", ["directory", "target"])
def test_a_place_that_cannot_be_written_is_a_warning(tmp_path, caplog, blocked):
    """A file where a directory should be stops root too, which permissions do not."""
    cache = ChoiceCache(str(tmp_path / "cache"))
    if blocked == "directory":
        (tmp_path / "cache").write_text("")
    else:
        cache.path(key_of()).mkdir(parents=True)
        assert cache.load(key_of()) is None
    cache.store(key_of(), MEASURED)
    assert "measures again" in caplog.text
    assert [f for f in tmp_path.rglob("*.new")] == []


def test_off_keeps_nothing(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = ChoiceCache("off")
    cache.store(key_of(), MEASURED)
    assert cache.load(key_of()) is None and not os.listdir(tmp_path) and not caplog.records


def test_the_place_is_the_users_cache(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "turnout" / "comm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_directory() == tmp_path / ".cache" / "turnout" / "comm"

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        assert ChoiceCache(None).load(key_of()) is None
    assert "measured at every start" in caplog.text
