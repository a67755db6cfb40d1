"""Two GPUs over NCCL: every dispatcher and expert layout gives the tokens of one GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]

SCRIPT = """
import json, sys
from engine import LLM, SamplingParams
settings = json.loads(sys.argv[1])
prompts = ["The sea was calm, and the old man", "What is 17 + 25?", [5, 6, 7] * 40]
with LLM(device="cuda", dtype="float32", max_num_batched_tokens=64, **settings) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
print(json.dumps([o.outputs[0].token_ids for o in outputs]))
"""

SCORES = """
import json, sys
from engine import LLM, SamplingParams
settings = json.loads(sys.argv[1])
prompts = ["The sea was calm, and the old man", "What is 17 + 25?", [5, 6, 7] * 40]
with LLM(device="cuda", dtype="bfloat16", **settings) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0))
print(json.dumps([next(iter(row.values())).logprob for o in outputs for row in o.prompt_logprobs[1:]]))
"""


def scores(**settings) -> torch.Tensor:
    """Log-probabilities of the prompts' tokens in bfloat16."""
    return torch.tensor(answer(SCORES, settings))


def answer(script: str, settings: dict) -> list:
    command = [sys.executable, "-c", script, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def tokens(**settings) -> list[list[int]]:
    return answer(SCRIPT, settings)


@pytest.fixture(scope="module")
def on_one_gpu() -> list[list[int]]:
    return tokens()


@pytest.mark.parametrize("moe_comm", ["reference", "allreduce", "nccl_agrs", "nccl_a2a"])
@pytest.mark.parametrize("ep", [1, 2])
def test_tokens_equal_one_gpu(on_one_gpu, moe_comm, ep):
    assert tokens(tp=2, ep=ep, moe_comm=moe_comm) == on_one_gpu


@pytest.fixture(scope="module")
def scores_on_one_gpu() -> torch.Tensor:
    return scores()


@pytest.mark.parametrize(
    ("moe_comm", "ep"),
    [("allreduce", 2), ("reference", 2), ("nccl_agrs", 2), ("nccl_a2a", 2), ("allreduce", 1)],
)
def test_bfloat16_scores_stay_within_rounding_of_one_gpu(scores_on_one_gpu, moe_comm, ep):
    """The kernels' parts, packed experts and local ids through every dispatcher."""
    error = (scores(tp=2, ep=ep, moe_comm=moe_comm) - scores_on_one_gpu).abs()
    assert error.mean() < 0.03 and error.max() < 0.5


def test_more_ranks_than_gpus_are_refused():
    command = [sys.executable, "-c", SCRIPT, json.dumps({"tp": 8, "ep": 8})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    available = torch.cuda.device_count()
    assert available < 8 and done.returncode != 0
    assert f"8 ranks need 8 GPUs on this host, but it has {available}" in done.stderr
