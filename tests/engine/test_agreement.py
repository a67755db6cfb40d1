"""What ranks must have in common: each difference is found and named, on every rank."""

from __future__ import annotations

import copy
import shutil
import threading
import time

import pytest

from engine import agreement
from engine.agreement import agree, checkpoint_digests, difference, facts_of
from engine.config import ConfigError, EngineConfig
from engine.errors import EngineDeadError
from tests.checkpoints import SMALL, build_checkpoint


class Store:
    """As much of torch's store as an agreement needs."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + 20
        while key not in self.values and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.values[key]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("agreement"), SMALL)


@pytest.fixture
def facts(directory) -> dict:
    return facts_of(EngineConfig(str(directory), device="cpu"), directory, 0)


def test_the_same_is_no_difference(directory, facts):
    again = facts_of(EngineConfig(str(directory), device="cpu"), directory, 3)
    assert difference(again, facts, 3) == "" and "config.json" in facts["checkpoint"]


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("settings", "max_num_seqs", 7, "rank 2 was started with max_num_seqs=7, rank 0 with 64; give all ranks the"),
        ("environment", "NCCL_ALGO", "Tree", "rank 2 has NCCL_ALGO=Tree, rank 0 no NCCL_ALGO; give all ranks the same"),
        ("versions", "torch", "1.0", "rank 2 has torch 1.0, rank 0 "),
        ("versions", "NCCL", "2.28.9", "rank 2 has NCCL 2.28.9, rank 0 None"),
        ("checkpoint", "config.json", "0", ": config.json differs; copy the same files"),
        ("checkpoint", "more.json", "0", ": more.json is missing on rank 0"),
    ],
)
def test_each_difference_is_named(facts, part, name, value, words):
    theirs = copy.deepcopy(facts)
    theirs[part][name] = value
    assert words in difference(theirs, facts, 2)


def test_what_belongs_to_a_host_may_differ(directory, facts, monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "MASTER_PORT"):
        monkeypatch.setenv(name, "eth7")
    again = facts_of(EngineConfig(str(directory), device="cpu"), directory, 1)
    assert difference(again, facts, 1) == ""
    monkeypatch.setenv("NCCL_PROTO", "LL")
    assert "NCCL_PROTO=LL" in difference(facts_of(EngineConfig(str(directory), device="cpu"), directory, 1), facts, 1)


def test_another_device_and_a_missing_file_are_named(facts):
    assert "rank 1 runs on H200, rank 0 on cpu" in difference(facts | {"device": "H200"}, facts, 1)
    lacking = copy.deepcopy(facts)
    del lacking["checkpoint"]["config.json"]
    found = difference(lacking, facts, 1)
    assert found.startswith(
        f"rank 1 has another checkpoint in {facts['directory']} than rank 0: config.json is missing"
    )


@pytest.mark.parametrize("change", ["config", "tail", "header", "shorter"])
def test_a_changed_file_changes_its_digest_alone(directory, tmp_path, change):
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    weights = sorted(other.glob("*.safetensors"))[0]
    changed = other / "config.json" if change == "config" else weights
    data = bytearray(changed.read_bytes())
    if change == "shorter":
        del data[-1]
    else:
        data[{"config": -1, "tail": -1, "header": 12}[change]] ^= 1
    changed.write_bytes(data)
    before, after = checkpoint_digests(directory), checkpoint_digests(other)
    differing = [name for name in before if before[name] != after[name]]
    assert differing == ([] if change == "tail" else [changed.name]), "numbers are not read"


def test_every_rank_raises_the_same_sentence(facts):
    store, raised = Store(), {}
    other = copy.deepcopy(facts)
    other["settings"]["ep"] = 2

    def join(rank: int) -> None:
        try:
            agree(other if rank == 2 else facts, store, rank, 4, lambda: None)
        except ConfigError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(raised) == {0, 1, 2, 3} and len(set(raised.values())) == 1 and "rank 2" in raised[0]


def test_rank_0_does_not_wait_for_a_rank_that_has_failed(facts):
    with pytest.raises(EngineDeadError, match="rank 1 ended"):
        agree(facts, Store(), 0, 2, lambda: "rank 1 ended without a word")


def test_a_version_that_is_not_installed_is_none():
    assert agreement._version("no-such-package-at-all") is None and agreement._version("torch")
