"""What a GPU's memory is promised to is what it holds, and cold blocks come back from the host as they were."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.cache_plan import GIB
from engine.config import FULL_CONFIG, ConfigError
from engine.host_blocks import HostBlocks
from engine.memory import GpuGauge

pytestmark = pytest.mark.gpu

SHARE = {"load_format": "dummy", "tp_share": 8, "device": "cuda", "hf_overrides": {"num_hidden_layers": 4}}


def test_promises_of_a_share_hold():
    """Everything that was planned for is in use at once: weights, graphs and a full cache; then a step of each kind."""
    with LLM(str(FULL_CONFIG), **SHARE, max_model_len=20000, max_num_seqs=32) as llm:
        runner = llm._engine.replica.runner
        limits, use = runner.limits, runner.limits.memory
        assert min(use.weights, use.step, use.graphs, use.margin) > 0 and use.graphs < GIB
        assert limits.cache_bytes <= use.available and runner.caches.nbytes == limits.cache_bytes
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=20, prompt_logprobs=20, top_p=0.9)
        llm.generate([[5] * 19000], params)
        llm.generate([[i] * (1 + i % 17) for i in range(64)], params)
        assert torch.cuda.max_memory_allocated() - before <= use.step
        assert torch.cuda.mem_get_info()[0] >= use.margin // 2


def test_b156_idle_memory_of_the_allocator_goes_back_before_it_is_counted():
    gauge = GpuGauge(torch.device("cuda", torch.cuda.current_device()))
    before = gauge.in_use()
    torch.empty(GIB, dtype=torch.uint8, device="cuda")  # as a load's last buffers, freed at once
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() >= GIB
    assert gauge.in_use() - before < GIB // 2


def test_a_cache_that_does_not_fit_is_refused_with_the_sum():
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gb asks for does not fit: a rank's weights take .* GiB"):
        LLM(str(FULL_CONFIG), **SHARE, max_num_seqs=1024, kv_cache_memory_gb=2000.0)


def test_cold_blocks_come_back_from_the_host():
    """The same tail is computed behind the same restored blocks each time: the same tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[(7 * i + seed) % 300 for i in range(700)] for seed in range(3)]
    with LLM(device="cuda", dtype="bfloat16", max_num_seqs=2, max_model_len=1024, kv_offload_gb=0.2) as llm:
        cache = llm._engine.replica.scheduler.kv_cache
        cache.pool.take(cache.pool.num_free - 16)  # one prompt and a half
        llm.generate(prompts, params)
        again = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
        assert cache.host.num_restored >= 8
        warm = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert again == warm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_copies_keep_every_bit(dtype):
    layers = torch.randint(0, 255, (5, 60, 64, 576), device="cuda").to(dtype)
    single = torch.randn(60, 64, 256, device="cuda").bfloat16()
    before = layers.clone(), single.clone()
    host = HostBlocks(50, [((5, 64, 576), dtype), ((64, 256), torch.bfloat16)], torch.device("cuda"))
    caches = [layers.transpose(0, 1), single]
    blocks, slots = torch.randperm(60)[:37].tolist(), torch.randperm(50)[:37].tolist()
    host.copy(list(zip(blocks, slots, strict=True)), [], caches)
    layers[:, blocks] = 0
    single[blocks] = 0
    host.copy([], list(zip(slots, blocks, strict=True)), caches)
    assert torch.equal(layers, before[0]) and torch.equal(single, before[1])
