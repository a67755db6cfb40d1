"""An engine whose steps go through another dispatcher at each size gives the tokens of one dispatcher."""

from __future__ import annotations

import pytest

from engine.comm import choice
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.gloo_ranks import on_ranks
from tests.rerun import record

RIVALS = ["allreduce", "symm_replicated", "symm_scatter"]
LENGTHS = (3, 150, 70, 1)


def fake_times(dispatcher, num_rows: int, *_) -> RoundTimes:
    best = "symm_replicated" if num_rows <= 2 else "symm_scatter" if num_rows <= 64 else "allreduce"
    return RoundTimes(1e-6 if dispatcher.name == best else 2e-6, 0.0, 1e-6)


def tokens(core: EngineCore) -> list[list[int]]:
    """Steps of all sizes: prompts in pieces and together, and decodes of four requests down to one."""
    requests = []
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0.0, max_tokens=3 + 2 * i, ignore_eos=True)
        requests.append(([(7 * i + j) % 300 for j in range(length)], params))
    return [answer.token_ids for answer in ask(core, *requests)]


def core_of(parallel: ParallelState, checkpoint: str, moe_comm: str) -> EngineCore:
    config = EngineConfig(
        checkpoint, tp=parallel.tp, ep=parallel.ep, device="cpu", dtype="float32", num_threads=1, max_num_seqs=4,
        max_num_batched_tokens=200, kv_cache_memory_gb=0.01, moe_comm=moe_comm, comm_cache="off",
    )  # fmt: skip
    files = ModelFiles.read(config)
    return EngineCore(config, files, ModelRunner(config, files, parallel))


def both_ways(parallel: ParallelState, checkpoint: str) -> dict:
    one = tokens(core_of(parallel, checkpoint, "reference"))
    choice.candidates, choice.time_dispatcher = lambda *_: RIVALS, fake_times
    mixed = core_of(parallel, checkpoint, "auto")
    runner = mixed.replica.runner
    found = {"one": one, "chosen": runner.dispatchers.report()["chosen"], "eager": tokens(mixed)}
    recorder = record(runner)
    found["replayed"] = tokens(mixed)
    found["replays"] = sum(graph.num_replays for graph in recorder.graphs)
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_dispatchers_may_change_from_step_to_step(tmp_path, tmp_path_factory, ep):
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("small"), SMALL)
    first, second = on_ranks(2, tmp_path, both_ways, str(checkpoint), ep=ep)
    assert first == second
    assert first["chosen"] == {
        1: "symm_replicated", 2: "symm_replicated", 4: "symm_scatter", 64: "symm_scatter", 128: "allreduce",
        200: "allreduce",
    }  # fmt: skip
    assert first["eager"] == first["one"] == first["replayed"] and first["replays"] > 0
