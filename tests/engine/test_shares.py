"""One rank's share of a larger world in one process: exactly that rank's tensors, and text in, text out over HTTP."""

from __future__ import annotations

import pytest
import torch

from engine import LLM, SamplingParams
from engine.comm.collectives import all_gather, all_reduce
from engine.comm.parallel_state import ParallelState
from engine.config import FULL_CONFIG, EngineConfig
from engine.launch import start_engine
from engine.model_files import ModelFiles
from engine.model_loading import check_model, load_share
from tests.checkpoints import TRUE_HEADS, build_checkpoint
from tests.engine.server.harness import serving
from tests.shares import config_directory


def model_of(directory, dtype="float32", device="meta", **settings):
    config = EngineConfig(str(directory), device="cpu", dtype=dtype, load_format="dummy", **settings)
    parallel = ParallelState(device=torch.device(device), **config.placement())
    return load_share(config, ModelFiles.read(config), parallel)


def shapes(model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_the_full_model_is_split_over_eight(ep):
    share = model_of(FULL_CONFIG, "bfloat16", tp_share=8, ep_share=ep, hf_overrides={"num_hidden_layers": 2})
    dense, moe = share.layers
    assert moe.self_attn.num_heads == 8 and moe.self_attn.qkv_a.weight.shape == (2112, 7168)
    assert moe.self_attn.q_b.weight.shape == (8 * 192, 1536) and moe.self_attn.o.weight.shape == (7168, 8 * 128)
    assert dense.feed_forward.down.weight.shape == (7168, 18432 // 8)
    assert moe.feed_forward.shared_down.weight.shape == (7168, 256)
    experts = moe.feed_forward.experts
    assert len(experts.local) == 384 // ep and experts.columns == slice(0, 2048 * ep // 8)
    assert share.lm_head.weight.shape == share.embed_tokens.weight.shape == (20480, 7168)


def test_a_share_has_the_shapes_of_rank_0(tmp_path):
    """The same tensors, one by one, as rank 0 of a world that really is so large."""
    directory = build_checkpoint(tmp_path, TRUE_HEADS)
    for tp, ep in ((2, 1), (4, 4), (8, 2)):
        config = EngineConfig(str(directory), device="cpu", dtype="float32", tp=tp, ep=ep)
        parallel = ParallelState(device=torch.device("meta"), **config.placement())
        rank_0 = load_share(config, ModelFiles.read(config), parallel)
        assert shapes(rank_0) == shapes(model_of(directory, tp_share=tp, ep_share=ep)), (tp, ep)


def test_the_full_share_is_as_large_as_planned():
    """Everything but the routed experts, whose storage is the kernel's choice."""
    model = model_of(FULL_CONFIG, "bfloat16", tp_share=8)
    experts = sum(p.nbytes for layer in model.layers[1:] for p in layer.feed_forward.experts.parameters())
    others = sum(p.nbytes for p in model.parameters()) - experts
    assert others == pytest.approx(4.542e9 + 0.2936e9, rel=0.001)
    weights = 60 * 384 * 3 * 7168 * 256
    assert experts / weights in (2.0, 0.5625), "either expanded to bfloat16 or packed with scales"


def test_collectives_of_a_share_exchange_nothing():
    share = ParallelState(tp=8, ep=2, is_share=True)
    x = torch.randn(3, 5)
    assert torch.equal(all_reduce(x.clone(), share)[0], x)
    stack, sent = all_gather(x, share)
    assert torch.equal(stack, x.unsqueeze(0)) and sent == 0
    assert share.split(64, "heads") == slice(0, 8) and share.expert_range(384) == range(192)
    assert not ParallelState(tp=8).is_alone and ParallelState().is_alone


def test_a_share_samples_from_its_own_rows(tmp_path):
    directory = config_directory(tmp_path, TRUE_HEADS)
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=3, prompt_logprobs=1, seed=1)
    with LLM(str(directory), load_format="dummy", tp_share=4, ep_share=2, device="cpu", max_model_len=256) as llm:
        again = [llm.chat([{"role": "user", "content": "Hello"}], params)[0].outputs[0].token_ids for _ in range(2)]
    assert again[0] == again[1] and len(set(again[0])) > 10
    assert max(again[0]) < TRUE_HEADS.vocab_size // 4


def test_http_on_a_share(tmp_path):
    """Synthetic tokenizer, borrowed template, logprobs whose other rows are ruled out: all of it JSON."""
    directory = config_directory(tmp_path / "made-up")
    config = EngineConfig(
        str(directory), load_format="dummy", tp_share=2, device="cpu", num_threads=1, max_model_len=256, max_num_seqs=4
    )
    core, _ = start_engine(config)
    with serving(core) as server:
        options = {"max_tokens": 8, "ignore_eos": True, "temperature": 0, "logprobs": True, "top_logprobs": 3}
        answer = server.chat(**options, return_token_ids=True)
        assert answer["usage"]["completion_tokens"] == 8 and len(answer["choices"][0]["token_ids"]) == 8
        text = "A text, naïve: 汉字 😀"
        scored = server.complete(prompt=text, echo=True, max_tokens=0, logprobs=1)["choices"][0]
        assert scored["text"] == text


def test_the_full_configuration_passes_the_check_at_once():
    config = EngineConfig(
        str(FULL_CONFIG), load_format="dummy", tp_share=8, device="cpu", dtype="bfloat16", kv_cache_memory_gb=20
    )
    files = ModelFiles.read(config)
    check_model(config, files)
    assert files.tokenizer.vocab_size == files.model_config.vocab_size == 163840
    assert {163584 + 1, 163586, 163593} <= files.eos_token_ids and files.chat_template is not None
    assert files.tokenizer.think_begin_id == 163606


def test_real_files_are_used_where_there_are_some(tmp_path):
    directory = build_checkpoint(tmp_path, TRUE_HEADS)
    config = EngineConfig(str(directory), load_format="dummy")
    own = ModelFiles.read(EngineConfig(str(directory))).tokenizer
    assert ModelFiles.read(config).tokenizer.encode("the thing") == own.encode("the thing")
