"""The soak of a rank's memory, dry: it seeks what it says it seeks, loses nothing, and tells what went wrong."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import memory_soak
from engine.core import EngineCore
from engine.kv_cache import KVCacheManager
from tests.shares import config_directory


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    model = config_directory(tmp_path_factory.mktemp("soak") / "model")
    shape = ["--max-model-len", "200", "--max-num-batched-tokens", "64", "--tp-share", "2", "--device", "cpu"]
    return ["--model", str(model), *shape, "--seconds", "2.5"]


def test_a_dry_soak_leaves_no_request_and_no_block(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_soak, "ARRIVALS_A_SECOND", 20.0)
    monkeypatch.setattr(memory_soak, "ABORTS_A_SECOND", 10.0)
    monkeypatch.setattr(memory_soak, "SQUEEZE_EVERY", 0.4)
    monkeypatch.setattr(memory_soak, "SQUEEZE_SECONDS", 0.3)
    assert memory_soak.main([*arguments, "--json", str(tmp_path / "soak.json")]) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    row = result["rows"][0]
    assert row["holds"] and row["requests"] > 1 and row["aborted"] > 0 and row["tokens"] > 0
    assert result["left"] == {"blocks": 0, "requests": 0} and result["failure"] is None
    assert result["memory_gib"] == {} and row["GiB free"] is None, "nothing is measured on a CPU"
    assert "tokens of KV cache" in result["limits"]


def test_a_step_that_fails_fails_the_soak(arguments, tmp_path, monkeypatch):
    def no_memory(core):
        raise MemoryError("no room")

    monkeypatch.setattr(EngineCore, "step", no_memory)
    assert memory_soak.main([*arguments, "--json", str(tmp_path / "soak.json")]) == 1
    assert "MemoryError: no room" in json.loads((tmp_path / "soak.json").read_text())["failure"]


def test_a_squeeze_takes_the_free_blocks_and_gives_them_back():
    cache = KVCacheManager(10, 4)
    core = SimpleNamespace(replica=SimpleNamespace(scheduler=SimpleNamespace(kv_cache=cache)))
    load = memory_soak.Load(core, seed=0, vocabulary=5)
    held = cache.pool.take(2)
    load.squeeze()
    assert cache.pool.num_free == memory_soak.FREE_BLOCKS == 0
    cache.pool.give_back(held)
    load.squeeze()
    assert cache.pool.num_free == 2, "one at a time"
    load.release()
    load.release()
    assert cache.pool.num_free == 9


def test_a_load_is_its_seeds():
    class Core:
        max_model_len, asked = 5000, []

        def add_request(self, name, prompt, params):
            self.asked.append((name, len(prompt), sum(prompt), params))

    loads = []
    for seed in (3, 3, 4):
        core = Core()
        core.asked = []
        load = memory_soak.Load(core, seed, vocabulary=50)
        for _ in range(60):
            load.arrive()
        loads.append(core.asked)
    assert loads[0] == loads[1] != loads[2]
    names = {name.rsplit(" ", 1)[0] for name, *_ in loads[0]}
    assert names == {kind.name for kind in memory_soak.KINDS} | {"session"}
    assert max(length for _, length, *_ in loads[0]) > 0.85 * 5000
