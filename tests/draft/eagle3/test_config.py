"""config.json of drafts: every spelling of the same, both numberings of layers, and refusals in one sentence."""

from __future__ import annotations

import pytest

import draft
from draft.base import TargetShape
from draft.eagle3.config import NO_LIMIT, Eagle3Config, FullHeads, LatentHeads
from draft.eagle3.layer_ids import LayerIds
from engine.layers.rotary import RopeParameters
from tests.drafts import DraftShape, draft_config

MLA, LLAMA = DraftShape(), DraftShape("llama")


def parse(shape: DraftShape = MLA, layer_ids=(1, 2, 4), convention="input", **changes) -> Eagle3Config:
    return Eagle3Config.from_dict(draft_config(shape, layer_ids, convention, **changes))


def before(ids, num_layers, convention=None, offset=0, **flat) -> tuple[int, ...]:
    flat |= {"eagle_aux_hidden_state_layer_ids": ids, "eagle_aux_hidden_state_convention": convention}
    return LayerIds.from_dict(flat).moved(offset).before(num_layers)


def test_what_a_config_says():
    mla = parse(max_position_embeddings=None)
    assert mla.heads == LatentHeads(8, 96, 64, 32, 16, 32, 1e-6) and mla.rms_norm_eps == 1e-5
    assert mla.max_positions == NO_LIMIT and mla.draft_vocab_size == mla.vocab_size == 4096
    llama = parse(LLAMA, head_dim=None, num_key_value_heads=None, max_position_embeddings=2048, draft_vocab_size=300)
    assert llama.heads == FullHeads(8, 8, 32) and llama.max_positions == 2048 and llama.has_reduced_vocabulary
    assert llama.rope == RopeParameters(1e6), "the draft's own"
    assert parse(LLAMA, model_type="llama4_text", intermediate_size_mlp=77).intermediate_size == 77


@pytest.mark.parametrize(
    ("ids", "num_layers", "convention", "expected"),
    [
        ([2, 30, 58], 61, None, (2, 30, 58)),
        ([1, 29, 57], 61, None, (2, 30, 58)),
        (None, 61, None, (2, 30, 58)),
        ([24, 30, 36], 36, None, (24, 30, 36)),
        ([1, 2, 4], 5, "input", (1, 2, 4)),
        ([1, 2, 4], 5, "output", (2, 3, 5)),
        ([1, 2, 4], 5, None, (2, 3, 5)),
        ([1, 2, 5], 5, None, (1, 2, 5)),
        ([2, 30, 58], 61, "output", (3, 31, 59)),
        ([0, 3], 4, None, (0, 3)),
    ],
)
def test_both_numberings_come_to_the_same_layers(ids, num_layers, convention, expected):
    assert before(ids, num_layers, convention) == expected
    if expected[0] > 0 and expected[-1] < num_layers:
        assert before(ids, num_layers, convention, offset=1) == tuple(i + 1 for i in expected)
        assert before(ids, num_layers, convention, offset=-1) == tuple(i - 1 for i in expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": None, "num_layers": 6}, r"\[2, 3, 3\] of 6, are not distinct; name them"),
        ({"ids": None, "num_layers": 5}, "not distinct"),
        ({"ids": [1, 30, 61], "num_layers": 60}, "before layers .*has 60 layers"),
        ({"ids": [1, 2, 5], "num_layers": 5, "convention": "output"}, "has 5 layers"),
        ({"ids": [2, 3, 5], "num_layers": 5, "offset": 1}, "has 5 layers"),
        ({"ids": [0, 3], "num_layers": 5, "offset": -1}, "before layers .*-1"),
        ({"ids": [2, 3], "num_layers": 5, "offset": 2}, "layer_id_offset must be -1, 0 or 1"),
        ({"ids": [2, 2, 3], "num_layers": 5}, "must grow"),
        ({"ids": [3, 2], "num_layers": 5}, "must grow"),
        ({"ids": [], "num_layers": 5}, "list of layer numbers"),
        ({"ids": [1, True], "num_layers": 5}, "list of layer numbers"),
        ({"ids": "2,3", "num_layers": 5}, "list of layer numbers"),
        ({"ids": [2, 3], "num_layers": 5, "convention": "both"}, "input or output"),
        ({"ids": [2, 3], "num_layers": 5, "num_aux_hidden_states": 3}, "num_aux_hidden_states=3, but there are 2"),
        ({"ids": [2, 3], "num_layers": 5, "use_aux_hidden_state": False}, "last normed state"),
    ],
)
def test_layer_ids_that_no_target_has(arguments, message):
    with pytest.raises(ValueError, match=message):
        before(**arguments)


def test_keys_stand_at_the_top_or_in_eagle_config():
    plain = parse(layer_ids=(2, 3), convention=None)
    top = draft_config(MLA, None, None, eagle_aux_hidden_state_layer_ids=[2, 3], num_aux_hidden_states=2)
    assert Eagle3Config.from_dict(top) == plain
    del top["eagle_config"]
    assert Eagle3Config.from_dict(top) == plain
    nested = {
        "eagle_aux_hidden_state_layer_ids": [2, 3],
        "use_aux_hidden_state": True,
        "norm_before_residual": True,
        "norm_before_fc": None,
        "use_aux_norm": True,
        "norm_output": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    config = parse(eagle_config=nested)
    assert config.norm_before_residual and config.fc_norm and config.norm_output and not config.norm_before_fc
    with pytest.raises(ValueError, match=r"both \[2, 4\] and \[2, 3\] of eagle_aux_hidden_state_layer_ids"):
        parse(eagle_config=nested, eagle_aux_hidden_state_layer_ids=[2, 4])


SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3"},
    "draft_vocab_size": 300,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "transformer_layer_config": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


def test_speculators_format():
    config = Eagle3Config.from_dict(SPECULATORS)
    expected = parse(LLAMA, None, None, draft_vocab_size=300, norm_before_residual=True)
    assert config == expected
    without = {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"}
    assert not Eagle3Config.from_dict(without).norm_before_residual, "the format's own default"
    with pytest.raises(ValueError, match="transformer_layer_config must be an object"):
        Eagle3Config.from_dict(SPECULATORS | {"transformer_layer_config": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, "architectures must be one of"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "architectures must be one of"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
        ({"bias": True}, "bias=true is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_mtp_layernorm": True}, "use_mtp_layernorm"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm"),
        ({"eagle_config": {"next_layer_regular": False}}, "next_layer_regular"),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, "use_input_layernorm_in_first_layer"),
        ({"eagle_config": {"norm_before_fcc": True}}, "norm_before_fcc is no key"),
        ({"norm_after_fc": True}, "norm_after_fc is no key"),
        ({"eagle_config": 3}, "eagle_config must be an object"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "guesses in parallel"),
        ({"ptd_token_id": 0}, "guesses in parallel"),
        ({"norm_before_fc": True, "fc_norm": True}, "both true"),
        ({"norm_output": 1}, "true or false"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"draft_vocab_size": 5000}, "more than vocab_size"),
        ({"draft_vocab_size": 300, "tie_word_embeddings": True}, "whole vocabulary"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a whole number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "rope type 'llama3' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 8}}, "yarn needs original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "truncate": False}},
            "truncate=false",
        ),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 8,
                    "original_max_position_embeddings": 64,
                    "attention_factor": 1,
                }
            },
            "attention_factor=1 is not supported",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(**changes)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 6}, "no multiple of num_key_value_heads"),
        ({"head_dim": 31}, "must be even"),
        ({"head_dim": None, "num_attention_heads": 12}, "lacks head_dim"),
    ],
)
def test_heads_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(LLAMA, **changes)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TargetShape(512, 4096, 5), r"hidden_size\) is 256, the target's 512; it was made for another target"),
        (TargetShape(256, 163840, 5), "vocab_size is 4096, the target's 163840"),
        (TargetShape(256, 4096, 3), "the target has 3 layers"),
    ],
)
def test_a_draft_for_another_target_is_refused(target, message):
    parse().check_target(TargetShape(256, 4096, 5))
    with pytest.raises(ValueError, match=message):
        parse().check_target(target)


def test_a_draft_of_another_width_is_refused():
    config = parse(target_hidden_size=512)
    with pytest.raises(ValueError, match="hidden_size is 256, the target's 512; a draft of another width"):
        config.check_target(TargetShape(512, 4096, 5))


def test_the_table_finds_a_draft_by_its_architecture():
    for name in draft.DRAFTS:
        entry = draft.find({"architectures": [name], "draft_vocab_size": 3})
        assert callable(entry.load)
    for config in ({}, {"architectures": []}, {"architectures": ["DeepseekV3ForCausalLM"]}, {"architectures": [3]}):
        with pytest.raises(ValueError, match="this engine drafts with LlamaForCausalLMEagle3"):
            draft.find(config)
    with pytest.raises(ValueError, match="no draft's"):
        draft.find({"architectures": ["LlamaForCausalLM"]})
