"""What fits is told from config and index alone, and to the byte what loading then allocates."""

from __future__ import annotations

import re

import pytest
import torch

from engine import cache_plan, model_loading
from engine.cache_plan import GIB
from engine.comm.parallel_state import ParallelState
from engine.config import FULL_CONFIG, TINY_CHECKPOINT, ConfigError, EngineConfig
from engine.model_files import ModelFiles
from engine.model_loading import check_model, load_draft, load_share
from engine.preflight import Subject, verdict, weigh, worlds
from models.kimi_k25.synthetic import Plan, write
from tests.checkpoints import SMALL, build_checkpoint, scaled
from tests.drafts import K25_LLAMA, K25_MLA, DraftShape, write_draft

GPUS = {"96 GB": int(95.6 * GIB), "H200": int(140.4 * GIB), "80 GB": int(79.6 * GIB)}
KINDS = ("attention", "dense layers", "shared expert", "routed experts", "router", "embedding and head")
SHAPE = scaled(SMALL, qk_rope_head_dim=16)


def full(**settings) -> EngineConfig:
    settings = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy"} | settings
    return EngineConfig(str(FULL_CONFIG), **settings)


def allocated(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of a loaded model's parameters by kind; router and shared expert, which share a product, together."""
    kinds = {"self_attn": "attention", "layernorm": "attention", "router": "router", "shared_down": "router"}
    kinds |= {"feed_forward.experts": "routed experts", "feed_forward": "dense layers"}
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        kind = next((kind for part, kind in kinds.items() if part in name), "embedding and head")
        found[kind] = found.get(kind, 0) + parameter.nbytes
    return found


def check_equal(config: EngineConfig, files: ModelFiles) -> None:
    """On the first rank and on the last: all hold as much."""
    found, placed = weigh(config, Subject.read(config), GIB), config.placement()
    weights = dict(found.weights)
    weights["router"] += weights.pop("shared expert")
    draft = weights.pop("draft", None)
    for rank in {0, placed["tp"] - 1}:
        parallel = ParallelState(device=torch.device("meta"), rank=rank, **placed)
        model = load_share(config, files, parallel)
        assert {kind: size for kind, size in weights.items() if size} == allocated(model)
        drafter = load_draft(config, files, parallel, model)
        assert draft == (None if drafter is None else sum(p.nbytes for p in drafter.model.parameters()))
        block = cache_plan.block_bytes(config, files, model, drafter)
        assert found.token_bytes * cache_plan.BLOCK_SIZE == block


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict:
    """Of one odd shape each."""
    made = tmp_path_factory.mktemp("preflight")

    def synthetic(name: str, **changes) -> str:
        sizes = {"num_hidden_layers": 3, "n_routed_experts": 16, "hidden_size": 512, "moe_intermediate_size": 512}
        sizes |= {"intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 1003} | changes
        write(Plan.of(sizes, {"vt_num_hidden_layers": 0}, is_sparse=True), made / name)
        return str(made / name)

    return {
        "tiny": str(TINY_CHECKPOINT),
        "small": str(build_checkpoint(made / "small", SHAPE, vision=True)),
        "dense": str(build_checkpoint(made / "dense", scaled(SHAPE, first_k_dense_replace=9), quant="bf16")),
        "floats": str(build_checkpoint(made / "floats", SHAPE, quant="bf16", prefix="", wrapper="kimi_k2")),
        "tiles": synthetic("tiles"),
        "no query latent": synthetic("plain", q_lora_rank=None, n_shared_experts=0, moe_intermediate_size=96),
    }


@pytest.mark.parametrize("name", ["tiny", "small", "dense", "floats", "tiles", "no query latent"])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
def test_weights_are_to_the_byte_what_loading_allocates(checkpoints, name, device, dtype):
    if device == "cuda":
        pytest.importorskip("triton")
    settings = {"device": device, "dtype": dtype}
    files, compared = ModelFiles.read(EngineConfig(checkpoints[name], **settings)), 0
    for tp, ep, comm in [(1, 1, "auto"), (2, 1, "auto"), (2, 2, "auto"), (4, 2, "nccl_a2a"), (4, 4, "auto")]:
        config = EngineConfig(checkpoints[name], tp=tp, ep=ep, moe_comm=comm, **settings)
        try:
            check_equal(config, files)
            compared += 1
        except ConfigError as error:
            with pytest.raises(ConfigError) as refusal:
                load_share(config, files, ParallelState(device=torch.device("meta"), tp=tp, ep=ep))
            assert str(error) == str(refusal.value)
    assert compared >= 3


def test_no_share_is_asked_of_experts_that_no_layer_has(tmp_path):
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "n_routed_experts": 8, "hidden_size": 128}
    sizes |= {"moe_intermediate_size": 128, "intermediate_size": 192, "num_attention_heads": 6, "vocab_size": 1024}
    write(Plan.of(sizes, {"vt_num_hidden_layers": 0}, is_sparse=True), tmp_path / "dense")
    config = EngineConfig(str(tmp_path / "dense"), tp=3, device="cpu", dtype="float32", load_format="dummy")
    check_equal(config, ModelFiles.read(config))


@pytest.mark.parametrize("shape", [DraftShape(), DraftShape("llama", has_embedding=True)])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_draft_counts_with_its_weights_and_its_cache(tmp_path, shape, tp):
    draft = write_draft(tmp_path, shape)
    cache = "auto" if tp == 1 else "fp8"
    config = EngineConfig(draft=str(draft), tp=tp, ep=tp, device="cpu", dtype="float32", kv_cache_dtype=cache)
    check_equal(config, ModelFiles.read(config))
    assert weigh(config, Subject.read(config), GIB).weights["draft"] > 2**20 / tp


@pytest.mark.parametrize(("tp", "ep"), [(8, 8), (8, 1), (16, 4), (64, 64)])
def test_shares_of_the_full_model(tmp_path, tp, ep):
    pytest.importorskip("triton")
    draft = write_draft(tmp_path, K25_MLA if ep == tp else K25_LLAMA, layer_ids=(0, 1, 2), sparse=True)
    few = {"num_hidden_layers": 3}
    config = full(tp_share=tp, ep_share=ep, draft=str(draft), hf_overrides=few)
    check_equal(config, ModelFiles.read(config))
    assert set(weigh(config, Subject.read(config), GIB).weights) == {*KINDS, "draft"}


VERDICTS = [
    (
        "96 GB",
        {"tp_share": 8},
        "fits: 8 ranks of 95.60 GiB: 70.95 GiB of weights each, 19.87 for the KV cache = 303616",
    ),
    ("H200", {"tp_share": 8, "draft": "auto"}, "71.43 GiB of weights each, 63.30 for the KV cache = 951552 tokens in"),
    ("80 GB", {"tp_share": 8, "ep_share": 8}, "fits: .* 64000 tokens in all, a request up to 64000."),
    ("80 GB", {"tp_share": 8, "max_model_len": 131072}, "does not fit: 8 ranks of 79.60 GiB: each needs 70.95 GiB of "),
    ("80 GB", {"tp_share": 8, "max_model_len": 131072}, r"weights \+ 1.00 for graphs \+ 1.86 for a step \+ 1.59 kept "),
    ("80 GB", {"tp_share": 8, "max_model_len": 131072}, r"free \+ 8.58 of KV cache for 131072 tokens = 83.99 of 79.60"),
    ("80 GB", {"tp_share": 8, "max_model_len": 131072}, "GiB; tp 16 or --max-model-len 64000 would fit."),
    ("80 GB", {"tp_share": 8, "max_model_len": 100000}, "or --kv-cache-dtype fp8 would fit"),
    (
        "80 GB",
        {"tp_share": 8, "max_model_len": 60000, "draft": "auto"},
        "55808 or no draft or --kv-cache-dtype fp8 wou",
    ),
    (
        "80 GB",
        {"tp_share": 8, "kv_cache_memory_gb": 6},
        "6.00 of KV cache asked for .* or no --kv-cache-memory-gb would",
    ),
    ("80 GB", {"tp_share": 4}, "does not fit: 4 ranks .* for 64 tokens = 144.33 of 79.60 GiB; tp 8 would fit."),
    (
        "80 GB",
        {"tp_share": 64, "hf_overrides": {"hidden_size": 71680}},
        "no change of one setting makes it fit; use la",
    ),
]


@pytest.mark.parametrize(("gpu", "settings", "words"), VERDICTS)
def test_b158_the_verdict_gives_the_sum_and_what_would_fit(gpu, settings, words):
    config = full(**settings)
    subject = Subject.read(config)
    assert re.search(words, verdict(config, subject, weigh(config, subject, GPUS[gpu])))


def test_what_is_said_to_fit_does(tmp_path):
    """The longest request that is offered fits, one block more does not; so with the ranks."""
    config = full(tp_share=8, max_model_len=131072)
    subject, total = Subject.read(config), GPUS["80 GB"]
    longest = weigh(config, subject, total).longest
    asked = (full(tp_share=8, max_model_len=length) for length in (longest, longest + 1))
    lengths = {one.max_model_len: weigh(one, subject, total).fits for one in asked}
    assert lengths == {longest: True, longest + 1: False}
    fitting = {one.tp: one.fits for one in worlds(config, subject, total)}
    assert fitting == {1: False, 2: False, 4: False, 8: False, 16: True, 32: True, 64: True}


def test_the_cache_that_is_forecast_is_the_one_that_is_planned():
    """Of the same bytes, as many tokens as `cache_plan.plan` makes of them."""
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_memory_gb=0.01, max_num_seqs=2)
    files = ModelFiles.read(config)
    found = weigh(config, Subject.read(config), 100 * GIB)
    size = found.token_bytes * cache_plan.BLOCK_SIZE
    limits = cache_plan.plan(config, files, size, int(0.01 * GIB), int(0.01 * GIB) // size)
    assert found.tokens == limits.num_tokens and found.longest == limits.longest


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_share": 4}, "weights take 3.66 GiB, and its GPU has 4.00 GiB, of which 1.00 are kept free; use more"),
        ({"tp_share": 8, "max_model_len": 262144, "hf_overrides": {"num_hidden_layers": 2, "kv_lora_rank": 4096}},
         "262144 tokens of KV cache take .* GiB, and a rank.s weights of .* lower max_model_len or use"),
        ({"tp_share": 8, "kv_cache_memory_gb": 3.5}, "KV cache of 3.50 GiB that kv_cache_memory_gb asks for does not"),
    ],
)  # fmt: skip
def test_b158_a_start_refuses_what_cannot_fit_before_it_loads(monkeypatch, settings, words):
    pytest.importorskip("triton")
    monkeypatch.setattr(model_loading, "gpu_bytes", lambda: 4 * GIB)
    config = full(**{"hf_overrides": {"num_hidden_layers": 2}, "max_num_seqs": 10**6} | settings)
    with pytest.raises(ConfigError, match=words):
        check_model(config, ModelFiles.read(config))


def test_a_start_says_what_to_expect(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(model_loading, "gpu_bytes", lambda: GPUS["96 GB"])
    config = full(tp_share=8, hf_overrides={"num_hidden_layers": 2})
    assert re.match(r"fits: 8 ranks of 95.60 GiB: 1.\d\d GiB of weights", check_model(config, ModelFiles.read(config)))
    onto_processors = EngineConfig(device="cpu", dtype="float32")
    assert check_model(onto_processors, ModelFiles.read(onto_processors)) is None
