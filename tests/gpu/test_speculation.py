"""Speculation on a GPU: its kernels in every kind of step, whole graphs with a real draft, and no token changed."""

from __future__ import annotations

import random

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core import EngineCore
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.scripted_drafts import build, one_more_each_time, right, sometimes, teach, wrong

pytestmark = pytest.mark.gpu

MOST = 8
K = 3


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(300) for _ in range(rng.choice([1, 5, 63, 64, 65, 200]))] for _ in range(count)]


def params_of(count: int, **changes) -> list[SamplingParams]:
    """Answers of different lengths, so that steps go down through all buckets with padding."""
    return [SamplingParams(max_tokens=9 + 5 * i, seed=i, ignore_eos=True, **changes) for i in range(count)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("speculation"), SMALL)


SETTINGS = {"device": "cuda", "dtype": "float32", "kv_cache_memory_gb": 0.1, "max_num_seqs": 5, "max_model_len": 512}


@pytest.fixture(scope="module")
def plain(checkpoint) -> EngineCore:
    torch.backends.cuda.matmul.allow_tf32 = False
    return build(checkpoint, None, **SETTINGS)


@pytest.fixture(scope="module", params=["eager", "ahead"])
def guessing(request, checkpoint, plain) -> EngineCore:
    """In float32, whose products are plain ones: what is tried are the kernels of verifying and of drawing."""
    return build(checkpoint, K, request.param == "ahead", **SETTINGS)


@pytest.mark.parametrize("script", [right, sometimes, one_more_each_time, wrong], ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.02, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
        {"temperature": 0.7, "min_tokens": 5, "prompt_logprobs": 1},
    ],
    ids="+".join,
)
@pytest.mark.parametrize("count", [1, 4, 7])
def test_scripted_guesses_change_no_token(plain, guessing, count, changes, script):
    requests = list(zip(prompts(count), params_of(count, **changes), strict=True))
    expected = ask(plain, *requests)
    teach(guessing, requests, expected, script)
    found = ask(guessing, *requests)
    for one, other in zip(expected, found, strict=True):
        assert (one.token_ids, one.text, one.end) == (other.token_ids, other.text, other.end)
        assert len(one.logprobs) == len(other.logprobs)
    accepted = sum(a.metrics.num_accepted_tokens for a in found)
    assert accepted == 0 if script is wrong else accepted > 0


def llm_of(dtype: str, **settings) -> LLM:
    return LLM(device="cuda", dtype=dtype, max_num_seqs=MOST, kv_cache_memory_gb=1.0, **settings)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request):
    """Without and with the bundled draft, whose steps in bfloat16 are one graph each."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with llm_of(request.param) as one:
        drafting = {"draft": "auto", "num_draft_tokens": K, "adaptive_draft_tokens": False}
        with llm_of(request.param, **drafting) as other:
            graphs = other._engine.replica.runner.graphs
            assert (graphs is not None) is (request.param == "bfloat16")
            yield one, other


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", range(1, MOST + 1))
def test_the_bundled_draft_changes_no_token(pair, count, temperature):
    """All prompts enter in the first step, alike with and without guesses; decodes are within the invariant range."""
    some = prompts(count), params_of(count, temperature=temperature)
    plain, guessing = (llm.generate(*some) for llm in pair)
    assert [o.outputs[0].token_ids for o in guessing] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.metrics.num_draft_tokens for o in guessing) > 0


TEXTS = [
    "<|im_user|>user<|im_middle|>What is 17 + 25?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    "<|im_user|>user<|im_middle|>Hello, who are you?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
]


def test_the_bundled_draft_guesses_its_targets_own_text(pair):
    """In fewer steps, so that neither arm of the tests above can be the other by mistake."""
    params = SamplingParams(temperature=0.0, max_tokens=60)
    steps = []
    for llm in pair:
        before = llm._engine.stats().num_steps
        outputs = llm.generate(TEXTS, params)
        steps.append(llm._engine.stats().num_steps - before)
    assert steps[1] < 0.8 * steps[0] and sum(o.metrics.num_accepted_tokens for o in outputs) > 20
