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


def tokens(**settings) -> list[list[int]]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def on_one_gpu() -> list[list[int]]:
    return tokens()


@pytest.mark.parametrize("moe_comm", ["reference", "allreduce", "nccl_a2a"])
@pytest.mark.parametrize("ep", [1, 2])
def test_tokens_equal_one_gpu(on_one_gpu, moe_comm, ep):
    assert tokens(tp=2, ep=ep, moe_comm=moe_comm) == on_one_gpu


def test_more_ranks_than_gpus_are_refused():
    command = [sys.executable, "-c", SCRIPT, json.dumps({"tp": 8, "ep": 8})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    available = torch.cuda.device_count()
    assert available < 8 and done.returncode != 0
    assert f"8 ranks need 8 GPUs on this host, but it has {available}" in done.stderr
