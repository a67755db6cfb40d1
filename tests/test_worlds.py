"""Greedy tokens are the same on 1, 2, 4 and 8 ranks, for every placement of the experts and every dispatcher.

Each world is a plain script without a `__main__` guard, as a user would write it, in a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine import LLM
from engine.config import TINY_CHECKPOINT, ConfigError
from tests import oracle
from tests.checkpoints import SMALL, TRUE_HEADS, WIDE, build_checkpoint, scaled

ROOT = Path(__file__).resolve().parent.parent
DISPATCHERS = ("reference", "allreduce", "nccl_agrs", "nccl_a2a")
GROUP_SIZE = 32
NUM_TOKENS = 24

SCRIPT = """
import json, sys
from engine import LLM, SamplingParams
settings, prompts, num_tokens = json.loads(sys.argv[1])
llm = LLM(device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=48, **settings)
params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
print("TOKENS", json.dumps([o.outputs[0].token_ids for o in llm.generate(prompts, params)]))
"""
TINY_PROMPTS = (
    "<|im_user|>user<|im_middle|>What is 12 + 30?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    "The",
    "Once upon a time there was a small boat on a long river. " * 6,
)


@dataclass(frozen=True)
class World:
    tp: int
    ep: int
    moe_comm: str

    def __str__(self) -> str:
        return f"tp{self.tp}-ep{self.ep}-{self.moe_comm}"


def worlds(num_heads: int, num_experts: int, expert_width: int) -> list[World]:
    """Every placement that these sizes allow: heads and experts divide, and a slice is whole groups of 32."""
    found = []
    for tp in (2, 4, 8):
        for ep in (e for e in range(1, tp + 1) if tp % e == 0):
            whole_groups = expert_width % (tp // ep * GROUP_SIZE) == 0
            if num_heads % tp == 0 and num_experts % ep == 0 and whole_groups:
                found += [World(tp, ep, comm) for comm in DISPATCHERS]
    return found


TRUE_WORLDS = worlds(8, 16, 256)
TINY_WORLDS = worlds(8, 32, 128)
QUICK_TRUE = {World(2, 1, "allreduce"), World(2, 2, "nccl_a2a"), World(4, 2, "reference"), World(8, 8, "nccl_a2a")}
QUICK_TINY = {World(2, 2, "reference"), World(4, 2, "nccl_a2a"), World(2, 2, "nccl_agrs")}


def cases(every: list[World], quick: set[World]):
    """All worlds, those outside the quick set marked slow."""
    assert quick <= set(every)
    return [pytest.param(w, id=str(w), marks=() if w in quick else pytest.mark.slow) for w in every]


def run_world(model: Path, prompts, **settings) -> list[list[int]]:
    arguments = json.dumps([{"model": str(model), **settings}, prompts, NUM_TOKENS])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("TOKENS")).removeprefix("TOKENS"))


@functools.cache
def tokens_of_one_rank(model: Path, prompts: str) -> list[list[int]]:
    return run_world(model, json.loads(prompts))


@pytest.fixture(scope="session")
def true_heads(tmp_path_factory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("worlds"), TRUE_HEADS, shards=3)


@pytest.mark.parametrize("world", cases(TRUE_WORLDS, QUICK_TRUE))
def test_greedy_tokens_do_not_depend_on_the_world(true_heads, world):
    """Against transformers too, so that all worlds cannot be wrong together."""
    prompts = oracle.prompts()
    tokens = run_world(true_heads, prompts, tp=world.tp, ep=world.ep, moe_comm=world.moe_comm)
    assert tokens == tokens_of_one_rank(true_heads, json.dumps(prompts))


def test_one_rank_equals_transformers(true_heads):
    prompts = oracle.prompts()
    expected = oracle.greedy(oracle.deepseek_v3(true_heads), prompts, NUM_TOKENS)
    assert tokens_of_one_rank(true_heads, json.dumps(prompts)) == expected


@pytest.mark.parametrize("world", cases(TINY_WORLDS, QUICK_TINY))
def test_the_trained_checkpoint_answers_the_same_on_every_world(world):
    if not (TINY_CHECKPOINT / "config.json").is_file():
        pytest.fail(f"the bundled checkpoint is not at {TINY_CHECKPOINT}.")
    tokens = run_world(TINY_CHECKPOINT, TINY_PROMPTS, tp=world.tp, ep=world.ep, moe_comm=world.moe_comm)
    assert tokens == tokens_of_one_rank(TINY_CHECKPOINT, json.dumps(TINY_PROMPTS))


@pytest.fixture
def no_process_starts(monkeypatch):
    """A setting that cannot work is refused at once, not by ranks that were started for nothing."""

    def refuse(*_args, **_settings):
        raise AssertionError("a rank was started before the settings were checked")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def refusal(directory: Path, **settings) -> str:
    with pytest.raises(ConfigError) as caught:
        LLM(model=str(directory), device="cpu", dtype="float32", num_threads=1, **settings)
    message = str(caught.value)
    assert "\n" not in message and message.rstrip().endswith("."), message
    return message


def test_tp_must_divide_the_heads(no_process_starts, tmp_path):
    message = refusal(build_checkpoint(tmp_path, TRUE_HEADS), tp=3)
    assert "tp" in message and "3" in message and "8" in message and "head" in message


def test_ep_must_divide_tp(no_process_starts, tmp_path):
    message = refusal(build_checkpoint(tmp_path, TRUE_HEADS), tp=4, ep=3)
    assert "ep=3" in message and "tp=4" in message


def test_ep_must_divide_the_experts(no_process_starts, tmp_path):
    directory = build_checkpoint(tmp_path, scaled(TRUE_HEADS, n_routed_experts=12, num_hidden_layers=2))
    message = refusal(directory, tp=8, ep=8)
    assert "8" in message and "12" in message and "expert" in message


@pytest.mark.parametrize(
    ("shape", "tp", "numbers"),
    [
        (SMALL, 4, ("64", "4", "16", "32")),
        (scaled(WIDE, intermediate_size=192, n_shared_experts=3), 3, ("64", "3", "32")),
    ],
    ids=["half_a_group", "no_whole_column"],
)
def test_an_expert_slice_must_be_whole_groups(no_process_starts, tmp_path, shape, tp, numbers):
    """The message shows the sum: 64 columns over 4 ranks are 16 each, not a multiple of 32."""
    message = refusal(build_checkpoint(tmp_path, shape), tp=tp, ep=1)
    assert all(number in message for number in numbers), message


@pytest.mark.parametrize("name", ["no_such_dispatcher", ""])
def test_an_unknown_dispatcher_is_refused_with_the_known_ones(no_process_starts, tmp_path, name):
    message = refusal(build_checkpoint(tmp_path, SMALL), tp=2, ep=2, moe_comm=name)
    assert all(known in message for known in DISPATCHERS)
