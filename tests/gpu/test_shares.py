"""A share on one GPU: made-up weights, the clock of the measurements, and the streaming read against its twin."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.bench import gpu_timing
from engine.config import FULL_CONFIG
from engine.kernels import reference
from tests.checkpoints import TRUE_HEADS
from tests.shares import config_directory

pytestmark = pytest.mark.gpu


def test_a_share_of_the_tiny_shape_answers(tmp_path):
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3)
    directory = str(config_directory(tmp_path, TRUE_HEADS))
    with LLM(directory, load_format="dummy", tp_share=2, device="cuda", kv_cache_memory_gb=0.1) as llm:
        first, second = (llm.generate("Hello", params)[0].outputs[0].token_ids for _ in range(2))
        assert first == second and len(set(first)) > 3 and max(first) < llm._engine.vocab_size // 2


def test_two_layers_of_the_full_share_are_finite():
    settings = {"hf_overrides": {"num_hidden_layers": 2}, "kv_cache_memory_gb": 1, "max_model_len": 512}
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    with LLM(str(FULL_CONFIG), load_format="dummy", tp_share=8, device="cuda", **settings) as llm:
        answer = llm.generate("the evening", params)[0].outputs[0]
    assert len(answer.token_ids) == 4 and max(answer.token_ids) < 20480
    assert all(0 >= next(iter(row.values())).logprob > -40 for row in answer.logprobs)


def test_the_streaming_read_adds_every_number():
    from engine.kernels.gpu.stream_read import stream_read

    BLOCK, LOADS = 2048, 2
    x = torch.randint(-8, 9, (16 * LOADS * 37 * BLOCK,), device="cuda").float()
    assert torch.equal(stream_read(x, (37, BLOCK, LOADS)), reference.stream_read(x, 37, BLOCK))


def test_a_graph_replays_every_call():
    device, out = torch.device("cuda"), torch.zeros(4, device="cuda")
    calls = [lambda i=i: out[i].add_(1) for i in range(4)]
    timing = gpu_timing.time_calls(calls, device, replays=5)
    runs = gpu_timing.WARM_UP + 5 + 1  # once before the capture
    assert out.tolist() == [runs] * 4 and timing.mode == "graph" and 0 < timing.median < 1e-3
    assert gpu_timing.time_calls(calls, device, 5, use_graph=False).mode == "eager"
