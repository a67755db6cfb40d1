"""config.json in the spellings that checkpoints of this family have."""

from __future__ import annotations

import json

import pytest

from engine.config import FULL_CONFIG
from models.kimi_k25.config import _COUNTS, KimiConfig


def raw() -> dict:
    return json.loads((FULL_CONFIG / "config.json").read_text())


def newer_rope(text: dict) -> dict:
    """As transformers 5 writes it."""
    scaling = dict(text.pop("rope_scaling"))
    return text | {
        "rope_parameters": {"rope_type": scaling.pop("type"), "rope_theta": text.pop("rope_theta")} | scaling
    }


def test_b152_nested_or_not_and_either_rope_spelling_is_the_same_model():
    expected = KimiConfig.from_dict(raw())
    flat = raw()["text_config"]
    spellings = [flat, newer_rope(dict(flat)), raw() | {"text_config": newer_rope(dict(flat))}]
    lifted = raw()
    lifted["quantization_config"] = lifted["text_config"].pop("quantization_config")
    assert [KimiConfig.from_dict(one) for one in [*spellings, lifted]] == [expected] * 4


OPTIONAL = ("n_group", "topk_group", "scoring_func", "topk_method", "hidden_act", "moe_layer_freq", "attention_bias",
            "tie_word_embeddings", "norm_topk_prob", "num_key_value_heads", "ep_size", "initializer_range")  # fmt: skip


def test_b152_optional_keys_may_be_missing():
    changed = raw()
    changed["text_config"] = {key: value for key, value in changed["text_config"].items() if key not in OPTIONAL}
    assert KimiConfig.from_dict(changed) == KimiConfig.from_dict(raw())


@pytest.mark.parametrize("key", _COUNTS)
def test_b152_a_missing_required_key_is_named(key):
    changed = raw()
    del changed["text_config"][key]
    with pytest.raises(ValueError, match=rf"config\.json.*{key}"):
        KimiConfig.from_dict(changed)
