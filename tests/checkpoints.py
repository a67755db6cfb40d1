"""Random checkpoints in the exact file layout of Kimi-K2.5, small enough to build inside a test.

The weights are scaled so that a comparison means something: embeddings and head give logits with clear gaps, routers
disagree between tokens, the correction bias changes the selection, norm weights are not one, and the inputs of the two
low-rank norms are small, so that their epsilon shows. The same shape and seed always give the same text weights,
whatever the wrapper, the prefix, the sharding or the vision tower.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config import TINY_CHECKPOINT
from tests.tokenizers import byte_ranks, write_tokenizer

GROUP_SIZE = 32
NUM_SPECIALS = 256
MERGES = ["".join(pair) for pair in product("etaoinsh", repeat=2)]
VISION = {"hidden": 32, "heads": 2, "layers": 1, "intermediate": 48, "grid": 4, "patch": 2}


@dataclass(frozen=True)
class Shape:
    """Sizes of a text model under the names of its config; `num_merges` sets the vocabulary (256 + merges + 256)."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    num_merges: int = len(MERGES)
    max_position_embeddings: int = 4096

    @property
    def num_ranks(self) -> int:
        """Ordinary tokens; the special ids follow."""
        return 256 + self.num_merges

    @property
    def vocab_size(self) -> int:
        return self.num_ranks + NUM_SPECIALS


SMALL = Shape("small", 64, 2, 128, 64, 8, 2, 4, 32, 32, 16, 8, 16)
WIDE = Shape("wide", 96, 5, 160, 64, 24, 3, 6, 72, 48, 24, 16, 40, n_shared_experts=2, first_k_dense_replace=2)
TRUE_HEADS = Shape("true_heads", 128, 3, 256, 256, 16, 4, 8, 96, 512, 128, 64, 128)
SHAPES = (SMALL, WIDE, TRUE_HEADS)


def pack_int4(q_OI: torch.Tensor) -> torch.Tensor:
    """Integers -8..7 [out, in] to int32 words [out, in / 8]: nibble = value + 8, lowest nibble = lowest column."""
    nibbles = (q_OI.to(torch.int64) + 8).reshape(q_OI.shape[0], -1, 8)
    words = (nibbles << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize_int4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric min-max over groups of 32 inputs: integers [out, in] and BF16 scales [out, in / 32]."""
    groups = weight_OI.float().reshape(weight_OI.shape[0], -1, GROUP_SIZE)
    scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16)
    q = torch.clamp(torch.round(groups / scale.float()), -8, 7)
    return q.reshape(weight_OI.shape).to(torch.int8), scale.squeeze(-1)


class _Random:
    """Seeded normal weights; `gain` is the standard deviation of the output for inputs of unit variance."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.randn(out_features, in_features, generator=self.generator) * (gain / in_features**0.5)
        return weight.to(torch.bfloat16)

    def norm(self, size: int) -> torch.Tensor:
        return (0.6 + 0.8 * torch.rand(size, generator=self.generator)).to(torch.bfloat16)

    def vector(self, size: int, std: float) -> torch.Tensor:
        return torch.randn(size, generator=self.generator) * std


def _expert_linear(weight: torch.Tensor, name: str, quant: str, shape_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if quant == "bf16":
        return {f"{name}.weight": weight}
    q, scale = quantize_int4(weight)
    return {
        f"{name}.weight_packed": pack_int4(q),
        f"{name}.weight_scale": scale,
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=shape_dtype),
    }


def _attention(rand: _Random, s: Shape, name: str) -> dict[str, torch.Tensor]:
    heads, nope, rope = s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim
    latent = rand.linear(s.kv_lora_rank, s.hidden_size, 0.02)  # small: the epsilon of the low-rank norms must show
    k_rope = rand.linear(rope, s.hidden_size, 1.0)
    return {
        f"{name}.q_a_proj.weight": rand.linear(s.q_lora_rank, s.hidden_size, 0.02),
        f"{name}.q_a_layernorm.weight": rand.norm(s.q_lora_rank),
        f"{name}.q_b_proj.weight": rand.linear(heads * (nope + rope), s.q_lora_rank),
        f"{name}.kv_a_proj_with_mqa.weight": torch.cat((latent, k_rope)),
        f"{name}.kv_a_layernorm.weight": rand.norm(s.kv_lora_rank),
        f"{name}.kv_b_proj.weight": rand.linear(heads * (nope + s.v_head_dim), s.kv_lora_rank),
        f"{name}.o_proj.weight": rand.linear(s.hidden_size, heads * s.v_head_dim, 1.5),
    }


def _mlp(rand: _Random, hidden: int, intermediate: int, name: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}.gate_proj.weight": rand.linear(intermediate, hidden, 1.5),
        f"{name}.up_proj.weight": rand.linear(intermediate, hidden, 1.0),
        f"{name}.down_proj.weight": rand.linear(hidden, intermediate, 1.0),
    }


def _moe(rand: _Random, s: Shape, name: str, quant: str, shape_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.gate.weight": rand.linear(s.n_routed_experts, s.hidden_size, 1.5),
        f"{name}.gate.e_score_correction_bias": rand.vector(s.n_routed_experts, 0.2),
    }
    shared = s.n_shared_experts * s.moe_intermediate_size
    tensors |= _mlp(rand, s.hidden_size, shared, f"{name}.shared_experts")
    for expert in range(s.n_routed_experts):
        for key, weight in _mlp(rand, s.hidden_size, s.moe_intermediate_size, f"{name}.experts.{expert}").items():
            tensors |= _expert_linear(weight, key.removesuffix(".weight"), quant, shape_dtype)
    return tensors


def text_tensors(s: Shape, seed: int, quant: str, shape_dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    """Every tensor of the text model under its name without prefix, in file order."""
    rand = _Random(seed)
    tensors = {}
    for layer in range(s.num_hidden_layers):
        name = f"model.layers.{layer}"
        tensors[f"{name}.input_layernorm.weight"] = rand.norm(s.hidden_size)
        tensors |= _attention(rand, s, f"{name}.self_attn")
        tensors[f"{name}.post_attention_layernorm.weight"] = rand.norm(s.hidden_size)
        if layer < s.first_k_dense_replace:
            tensors |= _mlp(rand, s.hidden_size, s.intermediate_size, f"{name}.mlp")
        else:
            tensors |= _moe(rand, s, f"{name}.mlp", quant, shape_dtype)
    tensors["model.norm.weight"] = rand.norm(s.hidden_size)
    tensors["model.embed_tokens.weight"] = rand.linear(s.vocab_size, s.hidden_size, s.hidden_size**0.5)
    tensors["lm_head.weight"] = rand.linear(s.vocab_size, s.hidden_size, 4.0)
    return tensors


def vision_tensors(s: Shape, seed: int) -> dict[str, torch.Tensor]:
    """A vision tower and projector of one small block, under the checkpoint's own names; no prefix."""
    rand, h, ff = _Random(seed + 1), VISION["hidden"], VISION["intermediate"]
    tensors = {
        "vision_tower.patch_embed.proj.weight": rand.linear(h, 3 * VISION["patch"] ** 2).reshape(
            h, 3, VISION["patch"], VISION["patch"]
        ),
        "vision_tower.patch_embed.pos_emb.weight": rand.linear(VISION["grid"] ** 2, h).reshape(
            VISION["grid"], VISION["grid"], h
        ),
    }
    biased = {"vision_tower.encoder.final_layernorm": None, "mm_projector.pre_norm": None}
    for layer in range(VISION["layers"]):
        block = f"vision_tower.encoder.blocks.{layer}"
        biased |= {f"{block}.norm0": None, f"{block}.norm1": None, f"{block}.wqkv": (3 * h, h), f"{block}.wo": (h, h)}
        biased |= {f"{block}.mlp.fc0": (ff, h), f"{block}.mlp.fc1": (h, ff)}
    biased |= {"mm_projector.proj.0": (4 * h, 4 * h), "mm_projector.proj.2": (s.hidden_size, 4 * h)}
    for name, size in biased.items():
        tensors[f"{name}.weight"] = rand.norm(h) if size is None else rand.linear(*size)
        tensors[f"{name}.bias"] = rand.vector(tensors[f"{name}.weight"].shape[0], 0.1).to(torch.bfloat16)
    tensors["vision_tower.patch_embed.proj.bias"] = rand.vector(h, 0.1).to(torch.bfloat16)
    return tensors


def _rope(s: Shape, spelling: str) -> dict:
    scaling = {
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    if spelling == "rope_scaling":
        return {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **scaling}}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, **scaling}}


QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "int",
                "num_bits": 4,
                "strategy": "group",
                "group_size": GROUP_SIZE,
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}


def text_config(s: Shape, quant: str, model_type: str, rope_spelling: str) -> dict:
    """The `text_config` of kimi_k25, or the whole config of a plain text checkpoint."""
    base = s.num_ranks
    sizes = {key: getattr(s, key) for key in Shape.__dataclass_fields__ if key not in ("name", "num_merges")}
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": model_type,
        **sizes,
        "vocab_size": s.vocab_size,
        "num_key_value_heads": s.num_attention_heads,
        "moe_layer_freq": 1,
        "ep_size": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pretraining_tp": 1,
        "bos_token_id": base,
        "eos_token_id": base + 1,
        "pad_token_id": base + 255,
        **_rope(s, rope_spelling),
    }
    if quant == "int4":
        config["quantization_config"] = QUANTIZATION
    return config


def _vision_config(s: Shape) -> dict:
    return {
        "vt_hidden_size": VISION["hidden"],
        "vt_intermediate_size": VISION["intermediate"],
        "vt_num_attention_heads": VISION["heads"],
        "vt_num_hidden_layers": VISION["layers"],
        "patch_size": VISION["patch"],
        "init_pos_emb_height": VISION["grid"],
        "init_pos_emb_width": VISION["grid"],
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": VISION["hidden"],
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": s.hidden_size,
    }


def model_config(s: Shape, quant: str, wrapper: str, rope_spelling: str, dtype_key: str) -> dict:
    """config.json for one of the three wrappers; the dtype key stands where the wrapper puts it, at the top."""
    if wrapper != "kimi_k25":
        return {**text_config(s, quant, wrapper, rope_spelling), dtype_key: "bfloat16"}
    text = text_config(s, quant, "kimi_k2", rope_spelling)
    kept = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        dtype_key: "bfloat16",
        **kept,
        "ignore_index": -100,
        "media_placeholder_token_id": s.num_ranks + 21,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "text_config": text,
        "vision_config": _vision_config(s),
    }


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor], shards: int, index: bool) -> None:
    """One or several safetensors files in file order, with or without `model.safetensors.index.json`."""
    if shards > 1 and not index:
        raise ValueError("several shards need an index.")
    names = list(tensors)
    files = (
        [f"model-{i + 1:05d}-of-{shards:06d}.safetensors" for i in range(shards)] if index else ["model.safetensors"]
    )
    weight_map = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        part = {name: tensors[name].contiguous() for name in names if weight_map[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    if index:
        total = sum(t.numel() * t.element_size() for t in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        (directory / "model.safetensors.index.json").write_text(text)


def build_checkpoint(
    directory: str | Path,
    shape: Shape,
    *,
    prefix: str = "language_model.",
    quant: str = "int4",
    wrapper: str = "kimi_k25",
    rope_spelling: str = "rope_scaling",
    dtype_key: str = "dtype",
    shape_dtype: torch.dtype = torch.int32,
    shards: int = 1,
    index: bool = True,
    vision: bool = False,
    seed: int = 0,
    **config_changes,
) -> Path:
    """Writes a whole Hugging Face directory and returns it; `config_changes` replace keys of the text config."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {prefix + name: t for name, t in text_tensors(shape, seed, quant, shape_dtype).items()}
    if vision:
        tensors |= vision_tensors(shape, seed)
    write_tensors(directory, tensors, shards, index)
    config = model_config(shape, quant, wrapper, rope_spelling, dtype_key)
    config.get("text_config", config).update(config_changes)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(directory, byte_ranks(MERGES[: shape.num_merges]))
    template = TINY_CHECKPOINT / "chat_template.jinja"
    if template.is_file():
        shutil.copy(template, directory)
    return directory


def scaled(shape: Shape, **changes) -> Shape:
    """The same shape with some sizes changed, for tests of limits."""
    return replace(shape, **changes)
