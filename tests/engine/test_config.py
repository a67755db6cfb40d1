from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import TINY_CHECKPOINT, ConfigError, EngineConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [(n, v) for n in ("tp", "ep", "max_num_seqs", "max_num_batched_tokens") for v in (0, -1, 1.0, "2", True, None)]
    + [(n, v) for n in ("max_model_len", "num_threads") for v in (0, -5, 2.5, "8", True, 10**11)]
    + [("kv_cache_memory_gb", v) for v in (1e300, 10**400, 0, -1.0, float("nan"), float("inf"), "4", True, [1])]
    + [("graph_memory_gb", v) for v in (None, -0.5, 1e300, float("nan"), "1", True)]
    + [("seed", v) for v in (None, 1.5, "x", [1], True)]
    + [("dtype", "float16"), ("dtype", None), ("device", "tpu"), ("load_format", "gguf")]
    + [("comm_cache", v) for v in ("", 5, True, ["a"])]
    + [("hf_overrides", "{}"), ("hf_overrides", [1]), ("model", 5), ("model", ["a"])],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    message = str(caught.value)
    assert name in message and message.endswith(".") and "\n" not in message


def test_paths_may_be_path_objects():
    config = EngineConfig(model=Path("a/b"), comm_cache=Path("c"))
    assert (config.model, config.comm_cache) == ("a/b", "c")
    assert EngineConfig.from_json(config.to_json()) == config


def test_ep_divides_tp():
    with pytest.raises(ConfigError, match=r"ep=3 does not divide tp=4; use one of \[1, 2, 4\]"):
        EngineConfig(tp=4, ep=3)
    assert EngineConfig(tp=4, ep=2).ep == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tp_share": 8}, "load_format='dummy'"),
        ({"tp_share": 8, "load_format": "safetensors"}, "load_format='dummy'"),
        ({"tp_share": 8, "tp": 2, "load_format": "dummy"}, "tp=2"),
        ({"ep_share": 8, "load_format": "dummy"}, "tp_share"),
        ({"tp_share": 8, "ep_share": 3, "load_format": "dummy"}, "use one of [1, 2, 4, 8]"),
        ({"tp_share": 8, "moe_comm": "nccl_a2a", "load_format": "dummy"}, "nccl_a2a"),
        ({"tp_share": 0, "load_format": "dummy"}, "tp_share"),
        ({"tp_share": 2, "ep_share": True, "load_format": "dummy"}, "ep_share"),
    ],
)
def test_a_share_that_makes_no_sense_is_refused(settings, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    message = str(caught.value)
    assert words in message and message.endswith(".") and "\n" not in message


def test_a_share_is_placed_in_its_world():
    assert EngineConfig(tp=4, ep=2).placement() == {"tp": 4, "ep": 2}
    share = EngineConfig(tp_share=8, load_format="dummy")
    assert share.placement() == {"tp": 8, "ep": 1, "is_share": True}
    assert EngineConfig.from_json(share.to_json()) == share


def test_a_huge_tp_is_refused_at_once():
    """Its divisors are not all looked for."""
    with pytest.raises(ConfigError, match="ep=2 does not divide"):
        EngineConfig(tp=10**9 + 7, ep=2)


def test_a_config_goes_through_json_unchanged():
    """Path and None included: other ranks read it from text."""
    config = EngineConfig(Path("/some/model"), tp=2, ep=2, hf_overrides={"low_rank_norm_eps": 1e-5}, seed=-3)
    assert config.model == "/some/model"
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig(None).model == str(TINY_CHECKPOINT)


@pytest.mark.parametrize(
    ("device", "dtype", "gpus", "expected"),
    [
        ("auto", "auto", 0, ("cpu", "float32")),
        ("auto", "auto", 8, ("cuda", "bfloat16")),
        ("cpu", "auto", 8, ("cpu", "float32")),
        ("auto", "float32", 8, ("cuda", "float32")),
        ("cpu", "bfloat16", 0, ("cpu", "bfloat16")),
    ],
)
def test_auto_becomes_a_value(device, dtype, gpus, expected):
    resolved = EngineConfig(device=device, dtype=dtype).resolve(gpus)
    assert (resolved.device, resolved.dtype) == expected


def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        EngineConfig(device="cuda").resolve(0)
