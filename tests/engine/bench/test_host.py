"""The host's work for a step is split without gaps, and what is put on the clock comes off it again."""

from __future__ import annotations

import json
import time

import pytest

from engine.bench import host
from engine.bench.__main__ import main
from engine.bench.host_events import measure_events
from engine.bench.host_parts import PARTS, PartsClock, clocked
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.decode_batch import DecodeBatch
from engine.model_files import ModelFiles
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.step_output import ModelRunnerOutput
from tests.shares import config_directory


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    model = str(config_directory(tmp_path_factory.mktemp("host") / "model"))
    return EngineConfig(model, load_format="dummy", device="cpu", max_num_seqs=4, max_model_len=1024).resolve(0)


@pytest.fixture(scope="module")
def files(config) -> ModelFiles:
    return ModelFiles.read(config)


def test_parts_within_parts_are_counted_once(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 8.0, 8.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = PartsClock()
    clock.begin("rest")
    clock.begin("launch")
    clock.begin("inputs")
    clock.end()
    clock.end()
    clock.end()
    assert clock.take() == {"rest": 1.5, "launch": 3.0, "inputs": 4.0} and clock.take() == {}


def test_a_step_is_on_the_clock_whole_and_only_within(config, files):
    core = EngineCore(config, files, host.InstantRunner(4, 1024))
    core.add_request("a", [1] * 100, SamplingParams(max_tokens=40, ignore_eos=True))
    before = [Scheduler.schedule, DecodeBatch.fill, EngineCore.step, ModelRunnerOutput.read]
    clock = PartsClock()
    with clocked(clock, host.InstantRunner):
        start = time.perf_counter()
        for _ in range(10):
            core.step()
        seconds = time.perf_counter() - start
        taken = clock.take()
    assert set(taken) == set(PARTS) and all(value > 0 for value in taken.values())
    assert 0.5 * seconds < sum(taken.values()) <= seconds
    assert [Scheduler.schedule, DecodeBatch.fill, EngineCore.step, ModelRunnerOutput.read] == before
    core.step()
    assert clock.take() == {}


def test_rows_add_up_and_leave_the_core_empty(config, files):
    core = EngineCore(config, files, host.InstantRunner(4, 1024))
    row = host.measure_host(core, 300, batch=3, context=70, steps=20)
    assert (row["requests"], row["context"], row["goal"], row["waited for the device"]) == (3, 70, None, 0.0)
    assert all(row[part] > 0 for part in PARTS) and row["whole step"] <= row["p99"]
    assert 0 < row["schedule + inputs"] < row["whole step"]
    assert not core.has_unfinished() and core.replica.scheduler.kv_cache.num_held == 0


def test_the_instant_device_leaves_one_token_a_step(config, files):
    core = EngineCore(config, files, host.InstantRunner(4, 1024))
    for name in "ab":
        core.add_request(name, [1] * 70, SamplingParams(max_tokens=5, ignore_eos=True))
    told = []
    while core.has_unfinished():
        told += core.step()
    for name in "ab":
        deltas = [delta for delta in told if delta.request_id == name]
        assert [delta.token_ids for delta in deltas] == [[host.A_WORD]] * 5
        assert [delta.finish_reason for delta in deltas] == [None] * 4 + ["length"]


def test_events_over_http(config, files):
    row = measure_events(config, files.tokenizer, streams=2, num_tokens=10)
    assert row["streams"] == 2 and row["us an event"] > 0 and 0 <= row["merged"] < 1
    assert row["us a step"] == pytest.approx(2 * row["us an event"]) and row["late us p99"] >= row["late us p50"] >= 0


def test_from_end_to_end(tmp_path, capsys):
    file = tmp_path / "host.json"
    assert (
        main(["host", "--batch", "1,2", "--context", "70", "--steps", "5", "--streams", "0", "--json", str(file)]) == 0
    )
    result = json.loads(file.read_text())
    assert [row["requests"] for row in result["rows"]] == [1, 2] and result["rows"][0]["goal"] == 150
    assert "schedule + inputs" in capsys.readouterr().out
    assert main(["host", "--steps", "0"]) == 2 and "--steps" in capsys.readouterr().err
