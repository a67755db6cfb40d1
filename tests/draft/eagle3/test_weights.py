"""Loading drafts: the names and shapes of published ones, what is shared with the target, and strictness."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft.base import TargetShape
from engine.comm.parallel_state import ParallelState
from engine.kernels.reference_kernels import ReferenceKernels
from engine.loading.weights import CheckpointError
from tests.drafts import K25_LLAMA, K25_MLA, DraftShape, draft_config, write_draft
from tests.eagle3_runs import HIDDEN, LENGTHS, LLAMA, MLA, VOCABULARY, Run, load, target_weights, texts

IDS = (2, 4, 5)
K25 = TargetShape(7168, 163840, 61)
KIMI_YARN = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
}
MOE_KEYS = {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "norm_topk_prob": True}
MODEL_OPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}
LAYERS_0 = {"prefix": "layers.0."}
# Name -> shape, layer ids, keys of config.json, parameters in billions as eagle3.md's section 1.2 has them.
PUBLISHED = {
    "k-l-lambda/Kimi-K2.5-Eagle3": (K25_MLA, (2, 30, 58), KIMI_YARN | MOE_KEYS, 1.841),
    "nvidia/Kimi-K2.5-Thinking-Eagle3": (
        replace(K25_MLA, **LAYERS_0),
        (1, 29, 57),
        {"architectures": ["Eagle3DeepseekV3ForCausalLM"], **MODEL_OPT},
        1.841,
    ),
    "lightseekorg/kimi-k2.6-eagle3-mla": (replace(K25_MLA, has_embedding=True), (2, 30, 58), KIMI_YARN, 3.016),
    "lightseekorg/kimi-k2.6-eagle3.1-mla": (
        replace(K25_MLA, has_embedding=True, fc_norm=True),
        (1, 29, 57),
        KIMI_YARN | {"norm_output": True},
        3.016,
    ),
    "lightseekorg/kimi-k2.5-eagle3": (K25_LLAMA, None, {}, None),
    "k-l-lambda/kimi-k2.7-code-eagle3-mla": (
        replace(K25_MLA, draft_vocab_size=32000, has_embedding=True),
        (2, 30, 58),
        KIMI_YARN,
        2.07,
    ),
    "cm00cm/Kimi-K2.7-Code-EAGLE3": (replace(K25_LLAMA, draft_vocab_size=32000), (1, 29, 57), {}, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafts_would_load(tmp_path, name):
    """Files of their length with their names and shapes; on any number of ranks that the heads allow."""
    shape, ids, changes, billions = PUBLISHED[name]
    directory = write_draft(tmp_path, shape, layer_ids=ids, convention=None, sparse=True, **changes)
    for tp in (1, 8):
        parallel = ParallelState(tp - 1, tp, device=torch.device("meta"))
        drafter = load(directory, parallel, target=K25)
        assert drafter.feature_layers == (2, 30, 58)
        width = 2 * 64 // tp * 128 if shape.style == "llama" else 576
        assert drafter.cache_width == width
        assert (drafter.model.embed_tokens is not None) == shape.has_embedding
        assert drafter.model.lm_head is not None
        if tp == 1 and billions:
            count = sum(parameter.numel() for parameter in drafter.model.parameters())
            assert count / 1e9 == pytest.approx(billions, abs=2e-3)


def test_every_spelling_is_the_same_draft(tmp_path):
    """Prefixes, `model.`, rotary leftovers and the order of the file leave no trace in what is loaded."""
    shape = replace(MLA, fc_norm=True)
    plain = load(write_draft(tmp_path / "plain", shape, layer_ids=IDS))
    held = load_file(tmp_path / "plain" / "model.safetensors")
    spelled = {}
    for name, tensor in sorted(held.items(), reverse=True):
        new = name.replace("midlayer.", "layers.0.").replace("fc_norm.0", "aux_norm_low")
        new = new.replace("fc_norm.1", "aux_norm_mid").replace("fc_norm.2", "aux_norm_high")
        spelled[new if new.startswith("lm_head") else f"model.{new}"] = tensor
    spelled["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(spelled, tmp_path / "plain" / "model.safetensors")
    other = load(tmp_path / "plain")
    for (name, one), (_, two) in zip(plain.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(one, two) and one.abs().max() > 0, name


@torch.inference_mode()
def test_the_drafts_own_embedding_and_head_come_first(tmp_path):
    data = texts()
    seen = {}
    for has_embedding in (False, True):
        for has_head in (False, True):
            shape = replace(MLA, has_embedding=has_embedding, has_head=has_head)
            directory = write_draft(tmp_path / f"{has_embedding}{has_head}", shape, layer_ids=IDS)
            run = Run(load(directory))
            own = load_file(directory / "model.safetensors")
            for kept, name, theirs in zip(
                (run.drafter.embed, run.drafter.head),
                ("embed_tokens.weight", "lm_head.weight"),
                target_weights(),
                strict=True,
            ):
                assert torch.equal(kept.weight, own[name].float() if name in own else theirs)
            seen[has_embedding, has_head] = run.propose(run.prefill(data, 20), LENGTHS, 5).tolist()
    assert seen[True, True] != seen[False, True] != seen[False, False]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc.weight": None}, "tensor fc.weight is missing"),
        ({"midlayer.self_attn.kv_b_proj.weight": None}, "tensor midlayer.self_attn.kv_b_proj.weight is missing"),
        ({"midlayer.mlp.gate.weight": torch.zeros(2)}, "tensor midlayer.mlp.gate.weight belongs to no part"),
        ({"fc.bias": torch.zeros(HIDDEN)}, "tensor fc.bias belongs to no part"),
        ({"fc_norm.0.weight": torch.zeros(HIDDEN)}, "tensor fc_norm.0.weight belongs to no part"),
        ({"input_norm.weight": torch.zeros(3 * HIDDEN)}, "tensor input_norm.weight belongs to no part"),
        ({"layers.0.hidden_norm.weight": torch.zeros(HIDDEN)}, "are the same part of a draft"),
        ({"mask_hidden": torch.zeros(HIDDEN)}, "guesses in parallel"),
        ({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}, "has shape .*, the config asks for"),
        ({"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN, dtype=torch.int8)}, "has type I8"),
        ({"d2t": torch.zeros(VOCABULARY - 1, dtype=torch.int64)}, "tensor d2t has shape"),
        ({"d2t": torch.arange(VOCABULARY)}, "does not lead to growing ids"),
        ({"t2d": torch.arange(VOCABULARY) > 0}, "t2d does not mark"),
    ],
)
def test_tensors_that_are_missing_or_left_over(tmp_path, tensors, message):
    directory = write_draft(tmp_path, MLA, layer_ids=IDS, tensors=tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        load(directory)
    assert "\n" not in str(error.value)


def offsets(ids: list[int]) -> torch.Tensor:
    return torch.tensor(ids) - torch.arange(len(ids))


def marks(ids: list[int]) -> torch.Tensor:
    return torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)


THIRDS = list(range(0, 60, 3))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": None}, "tensor d2t is missing"),
        ({"lm_head.weight": None}, "tensor lm_head.weight is missing"),
        ({"d2t": torch.zeros(20, dtype=torch.int64)}, "is all zero, but the draft's vocabulary is reduced"),
        ({"d2t": torch.arange(20)}, "counts 0, 1, 2"),
        ({"d2t": torch.tensor(THIRDS)}, None),  # absolute ids can pass for offsets; only t2d can tell
        ({"d2t": torch.tensor(THIRDS) * 2}, "does not lead to growing ids below 96"),
        ({"d2t": offsets([*THIRDS[:-1], 54])}, "does not lead to growing ids"),
        ({"d2t": offsets([*THIRDS[:-1], VOCABULARY])}, "does not lead to growing ids"),
        ({"d2t": offsets([-1, *THIRDS[1:]])}, "does not lead to growing ids"),
        ({"d2t": torch.zeros(20)}, "has type F32"),
        ({"d2t": offsets(THIRDS), "t2d": marks(THIRDS)}, None),
        ({"d2t": offsets(THIRDS).int()}, None),
        ({"d2t": torch.tensor(THIRDS), "t2d": marks(THIRDS)}, "t2d does not mark"),
        ({"d2t": offsets(THIRDS), "t2d": marks([*THIRDS, 41])}, "t2d does not mark"),
    ],
)
def test_the_table_of_a_reduced_vocabulary(tmp_path, tensors, message):
    directory = write_draft(tmp_path, replace(LLAMA, draft_vocab_size=20), layer_ids=IDS, tensors=tensors)
    if message is None:
        vocabulary = load(directory).model.vocabulary
        expected = torch.arange(20) + tensors["d2t"]
        assert torch.equal(vocabulary(torch.arange(20)), expected)
        return
    with pytest.raises(CheckpointError, match=message):
        load(directory)


def test_a_whole_vocabulary_needs_no_table(tmp_path):
    tensors = {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64), "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}
    drafter = load(write_draft(tmp_path, MLA, layer_ids=IDS, tensors=tensors, draft_vocab_size=VOCABULARY))
    ids = torch.tensor([5, 95])
    assert drafter.model.vocabulary(ids) is ids


class GpuWidths(ReferenceKernels):
    needs_powers_of_two = True


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (replace(MLA, kv_lora_rank=64, nope=16, rope=16, value=24), "v_head_dim=24 is no power of two"),
        (replace(MLA, kv_lora_rank=64), "qk_nope_head_dim=8 is no power of two from 16 on"),
        (replace(MLA, kv_lora_rank=32), "kv_lora_rank=32 is no power of two from 64 on"),
        (replace(LLAMA, head_dim=16), "head_dim=16 is none of 32, 64, 128"),
    ],
)
def test_widths_that_a_gpu_cannot_take(tmp_path, shape, message):
    directory = write_draft(tmp_path, shape, layer_ids=IDS)
    with pytest.raises(ValueError, match=message):
        load(directory, kernels=GpuWidths())


def test_a_target_that_it_does_not_fit(tmp_path):
    directory = write_draft(tmp_path, MLA, layer_ids=IDS)
    with pytest.raises(ValueError, match=r"^the draft's vocab_size is 96, the target's 97"):
        load(directory, target=TargetShape(HIDDEN, 97, 8))
    with pytest.raises(ValueError, match=r"has 8 layers; .* or its layer ids are wrong"):
        load(write_draft(tmp_path, MLA, layer_ids=(2, 4, 8)), layer_id_offset=1)


def test_the_log_tells_which_states_are_captured(tmp_path, caplog):
    directory = write_draft(tmp_path, MLA, layer_ids=(1, 3, 6), convention="output")
    logger = logging.getLogger("turnout")
    logger.addHandler(caplog.handler)
    logger.setLevel("INFO")
    try:
        assert load(directory, layer_id_offset=-1).feature_layers == (1, 3, 6)
        assert load(directory).feature_layers == (2, 4, 7)
    finally:
        logger.removeHandler(caplog.handler)
    assert "before layers [2, 4, 7] (layer ids [1, 3, 6], read as output of a layer), its own embedding" in caplog.text


def test_quantisation_of_the_target_is_not_inherited(tmp_path):
    """Keys of a target's quantisation that a draft's config took over say nothing of its tensors, which are floats."""
    directory = write_draft(tmp_path, MLA, layer_ids=IDS, quantization_config={"quant_method": "compressed-tensors"})
    assert load(directory).model.fc.weight.dtype == torch.float32


@torch.inference_mode()
def test_made_up_weights(tmp_path):
    """A directory without weights; the same seed gives the same, and nothing of the target is touched."""
    for shape, changes in ((MLA, {}), (replace(LLAMA, draft_vocab_size=40), {}), (MLA, {"tie_word_embeddings": True})):
        Path(tmp_path / "config.json").write_text(json.dumps(draft_config(shape, IDS, None, **changes)))
        one, same, other = (load(tmp_path, dummy_seed=seed) for seed in (1, 1, 2))
        assert torch.equal(one.embed.weight, target_weights()[0])
        for (name, a), (_, b), (_, c) in zip(*(d.model.named_parameters() for d in (one, same, other)), strict=True):
            assert torch.equal(a, b) and not torch.equal(a, c) and a.std() > 0, name
        run = Run(one)
        tokens = run.propose(run.prefill(texts(), 20), LENGTHS, 3)
        assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY
        assert run.cache[5].isfinite().all()


def test_the_default_shape_fits_the_bundled_checkpoint(tmp_path):
    """What others' tests rely on."""
    drafter = load(write_draft(tmp_path), target=TargetShape(256, 4096, 5))
    assert drafter.feature_layers == (1, 2, 4) and isinstance(DraftShape(), DraftShape)
