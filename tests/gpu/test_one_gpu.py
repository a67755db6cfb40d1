"""One GPU: the float32 path gives the tokens of the CPU, bfloat16 stays within its rounding, samplers agree."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.kernels.random import uniform

pytestmark = pytest.mark.gpu

PROMPTS = [
    "<|im_user|>user<|im_middle|>What is 17 + 25?<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    "The sea was calm, and the old man",
    "<|im_user|>user<|im_middle|>Hello, who are you?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, prompt_logprobs=0)


def answers(**settings):
    with LLM(**settings) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    tokens = [o.outputs[0].token_ids for o in outputs]
    scores = [next(iter(row.values())).logprob for o in outputs for row in o.prompt_logprobs[1:]]
    return tokens, torch.tensor(scores)


@pytest.fixture(scope="module")
def on_cpu():
    return answers(device="cpu")


def test_float32_tokens_equal_the_cpus(on_cpu):
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens, scores = answers(device="cuda", dtype="float32")
    assert tokens == on_cpu[0]
    assert (scores - on_cpu[1]).abs().max() < 1e-3


def test_bfloat16_scores_stay_within_rounding(on_cpu):
    _, scores = answers(device="cuda", dtype="bfloat16")
    error = (scores - on_cpu[1]).abs()
    assert error.mean() < 0.03 and error.max() < 0.5


def test_noise_has_the_same_bits_on_both_devices():
    seeds, positions = torch.tensor([7, -3, 2**62]), torch.tensor([0, 5, 2**33])
    on_gpu = uniform(seeds.cuda(), positions.cuda(), 4096).cpu()
    assert torch.equal(on_gpu, uniform(seeds, positions, 4096))


def test_cache_is_sized_from_free_memory():
    with LLM(device="cuda", max_num_seqs=256) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=4, temperature=0))[0].outputs[0].finish_reason
        assert torch.cuda.memory_reserved() < torch.cuda.get_device_properties(0).total_memory
