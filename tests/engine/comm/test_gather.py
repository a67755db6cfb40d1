"""What a draft reads of a target whose tokens are shared out over ranks: the same states, and so the same guesses."""

from __future__ import annotations

import pytest

from engine.config import TINY_CHECKPOINT, EngineConfig
from engine.sampling_params import SamplingParams
from tests.answers import ask
from tests.rank_cores import build_core, run_ranks

PROMPTS = [[(7 * i + 3) % 4000 for i in range(length)] for length in (5, 41, 18)]


def run(rank: int, moe_comm: str) -> dict:
    config = EngineConfig(
        str(TINY_CHECKPOINT), device="cpu", dtype="float32", num_threads=1, tp=2, ep=2, moe_comm=moe_comm, draft="auto",
        adaptive_draft_tokens=False, max_num_seqs=3, max_model_len=256, max_num_batched_tokens=37,
        kv_cache_memory_gb=0.05,
    )  # fmt: skip
    core = build_core(config, rank)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    answers = ask(core, *[(prompt, params) for prompt in PROMPTS])
    cache = core.replica.runner.sampled_step.cache[1:4].clone()
    core.replica.runner.close()
    return {"answers": [(a.token_ids, a.metrics.num_accepted_tokens) for a in answers], "cache": cache}


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return run_ranks(2, tmp_path_factory.mktemp("replicated"), run, "allreduce")


@pytest.mark.parametrize("moe_comm", ["symm_scatter", "nccl_agrs", "symm_sharded"])
def test_features_of_all_rows_reach_every_rank(tmp_path, replicated, moe_comm):
    found = run_ranks(2, tmp_path, run, moe_comm)
    for mine, theirs in zip(found, replicated, strict=True):
        assert mine["answers"] == theirs["answers"]
        assert sum(accepted for _, accepted in mine["answers"]) > 0
        assert float((mine["cache"] - theirs["cache"]).abs().max()) < 1e-4
