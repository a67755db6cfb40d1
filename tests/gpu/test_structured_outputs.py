"""Structured outputs on a GPU: the host's masks reach the right rows, in graphs and without, with guesses too."""

from __future__ import annotations

import json

import pytest
import torch

from engine import LLM, SamplingParams, StructuredOutputs, sampling
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.scripted_drafts import build, one_more_each_time, right, sometimes, teach, wrong

pytestmark = pytest.mark.gpu

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
SETTINGS = {"device": "cuda", "dtype": "float32", "kv_cache_memory_gb": 0.1, "max_num_seqs": 5, "max_model_len": 512}


@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 512), (5, 4096), (70, 1000), (64, 163_840)])
def test_the_device_forbids_what_the_host_says(rows, vocab_size):
    generator = torch.Generator().manual_seed(rows)
    logits_MV = torch.randn(rows + 3, vocab_size, generator=generator)
    rows_R = torch.randperm(rows + 3, generator=generator)[:rows]
    masks_RB = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab_size // 32)), generator=generator, dtype=torch.int32)
    on_device = logits_MV.cuda()
    sampling.forbid(on_device, rows_R.cuda(), masks_RB.cuda())
    sampling.forbid(logits_MV, rows_R, masks_RB)
    assert torch.equal(on_device.cpu(), logits_MV) and logits_MV.isinf().any()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.backends.cuda.matmul.allow_tf32 = False
    return build_checkpoint(tmp_path_factory.mktemp("structured"), SMALL)


@pytest.mark.parametrize("ahead", [False, True], ids=["eager", "ahead"])
@pytest.mark.parametrize("script", [right, sometimes, one_more_each_time, wrong], ids=lambda s: s.__name__)
def test_guesses_change_no_bound_answer(checkpoint, ahead, script):
    bound, choice = StructuredOutputs(json=CITY), StructuredOutputs(choice=("yes", "no"))
    requests = [
        ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=bound)),
        ([8] * 70, SamplingParams(temperature=0.9, seed=3, max_tokens=120, structured_outputs=bound, logprobs=2)),
        ([9], SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.2, ignore_eos=True)),
        ([4], SamplingParams(temperature=0.0, max_tokens=9, structured_outputs=choice)),
    ]
    expected = ask(build(checkpoint, None, **SETTINGS), *requests)
    guessing = build(checkpoint, 3, ahead, **SETTINGS)
    teach(guessing, requests, expected, script)
    found = ask(guessing, *requests)
    assert [(a.token_ids, a.end) for a in found] == [(a.token_ids, a.end) for a in expected]
    assert found[3].text in ("yes", "no")


def test_graphs_of_the_trained_model_write_what_eager_steps_write():
    """In bfloat16, with its draft: steps of so few rows are the same to the bit."""
    chats = [[{"role": "user", "content": text}] for text in ("Where is Oslo?", "A city with a harbour?", "Hello!")]
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=StructuredOutputs(json=CITY))
    texts = []
    for settings in ({}, {"enforce_eager": True}, {"draft": None}):
        llm = LLM(**{"draft": "auto", "device": "cuda", "dtype": "bfloat16", "kv_cache_memory_gb": 0.5} | settings)
        answers = llm.chat(chats, params, chat_template_kwargs={"thinking": False})
        texts.append([answer.outputs[0].text for answer in answers])
        assert all(set(json.loads(text)) == {"city", "size"} for text in texts[-1])
        llm.close()
    assert texts[0] == texts[1] == texts[2]
