"""Rounds of a step as deep as the full model, by kind, in every dispatch mode, eager and replayed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from engine.comm.dispatcher import DISPATCHERS, dispatcher_class
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.sampling_params import SamplingParams
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint, scaled
from tests.rank_cores import build_core, run_ranks
from tests.rerun import record

DEEP = scaled(
    SMALL, num_hidden_layers=61, hidden_size=32, intermediate_size=64, moe_intermediate_size=64, n_routed_experts=4
)
ONE_STEP = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TWO_STEPS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
OTHER_RANKS = 2  # the embedding's sum and the head's gather


@pytest.fixture(scope="module")
def deep(tmp_path_factory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("deep"), DEEP)


def settings(directory: Path, **more) -> EngineConfig:
    return EngineConfig(str(directory), device="cpu", dtype="float32", num_threads=1, max_model_len=64, **more)


def counted(core: EngineCore, params: SamplingParams) -> dict:
    """What a request of these steps adds to the counters."""
    before = core.stats()
    ask(core, ([1, 2, 3], params))
    after = core.stats()
    assert after.num_steps - before.num_steps == params.max_tokens
    rounds = {kind: count - before.comm_rounds[kind] for kind, count in after.comm_rounds.items()}
    return {"rounds": rounds, "bytes": dict(after.comm_bytes), "seconds": dict(after.comm_seconds)}


def step_of(name: str, ranks: int = 1) -> dict[str, int]:
    """Rounds of one step of 61 layers, the first of them dense."""
    reduced = name == "allreduce" and ranks > 1
    spread = int(dispatcher_class(name).shards_tokens)
    return {
        "attention_reduce": 61,
        "moe_dispatch": 60,
        "moe_combine": 0 if reduced else 61,
        "moe_all_reduce": 61 if reduced else 0,
        "other": spread + (OTHER_RANKS if ranks > 1 else 0),
    }


@pytest.mark.parametrize("name", DISPATCHERS)
def test_rounds_of_a_step_on_one_rank(deep, name):
    core = _core_or_skip(settings(deep, moe_comm=name))
    assert counted(core, ONE_STEP)["rounds"] == step_of(name)


def _core_or_skip(config: EngineConfig) -> EngineCore:
    try:
        return build_core(config)
    except (ConfigError, ValueError) as error:
        pytest.skip(f"{config.moe_comm} does not run here: {error}")


@pytest.mark.parametrize("name", ["reference", "allreduce"])
def test_a_replayed_step_counts_as_much(deep, name):
    core = build_core(settings(deep, moe_comm=name, max_num_seqs=1))
    recorder = record(core.replica.runner)
    for graph in recorder.graphs:  # a graph runs no Python
        graph.replay = lambda: None
    assert counted(core, TWO_STEPS)["rounds"] == {kind: 2 * count for kind, count in step_of(name).items()}


def run_all(rank: int, directory: str) -> dict[str, dict]:
    found = {}
    for name in DISPATCHERS:
        try:
            core = build_core(settings(Path(directory), moe_comm=name, tp=2, ep=2), rank)
        except ValueError:
            continue
        found[name] = counted(core, ONE_STEP)
    return found


@pytest.fixture(scope="module")
def two_ranks(deep, tmp_path_factory) -> list[dict[str, dict]]:
    return run_ranks(2, tmp_path_factory.mktemp("two"), run_all, str(deep))


def test_rounds_of_a_step_on_two_ranks(two_ranks):
    for found in two_ranks:
        assert set(found) >= {"reference", "allreduce", "nccl_a2a"}
        for name, counts in found.items():
            assert counts["rounds"] == step_of(name, ranks=2), name


def test_seconds_on_two_ranks_are_of_what_crossed(two_ranks):
    """By the clock: of the kinds that sent bytes and of no other, and no more than the run took."""
    for found in two_ranks:
        for name, counts in found.items():
            timed = {kind for kind, seconds in counts["seconds"].items() if seconds > 0}
            assert timed == {kind for kind, sent in counts["bytes"].items() if sent} == set(counts["seconds"]), name
            assert 0 < sum(counts["seconds"].values()) < 60


def test_replayed_steps_are_estimated_from_what_was_measured(deep, monkeypatch):
    core = build_core(settings(deep, max_num_seqs=1))
    runner = core.replica.runner
    report = {
        "microseconds": {1: {"reference": 15.0}},
        "chosen": {1: "reference"},
        "rounds": {1: {"reduce": 7.0, "dispatch": 0.0, "combine": 8.0}},
    }
    monkeypatch.setattr(runner.dispatchers, "report", lambda: report, raising=False)
    record(runner)
    runner.parallel.meter.clear()
    ask(core, ([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)))
    stats = core.stats()
    assert stats.comm_choice == report
    expected = {"attention_reduce": 3 * 61 * 7e-6, "moe_combine": 3 * 61 * 8e-6}
    assert stats.comm_seconds == pytest.approx(expected), "the prompt's step was not replayed"
    assert asdict(stats)["comm_rounds"]["moe_dispatch"] >= 4 * 60
