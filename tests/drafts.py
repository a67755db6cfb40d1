"""EAGLE-3 draft directories made up by a seed, in the spellings of published ones.

`write_draft` writes any size; with `sparse` the file has its true length and holds nothing, which the checks of names
and shapes cannot tell, so that a draft of K2.5's size costs no disk. Weights are scaled so that a comparison means
something: norm weights are not one, logits have clear gaps, and the low-rank norms' epsilon shows.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_CODES = {torch.bfloat16: ("BF16", 2), torch.float32: ("F32", 4), torch.int64: ("I64", 8), torch.bool: ("BOOL", 1)}


@dataclass(frozen=True)
class DraftShape:
    """style: "mla" or "llama". The widths of the other style are not looked at. prefix: of the layer's tensors."""

    style: str = "mla"
    hidden_size: int = 256
    vocab_size: int = 4096
    intermediate_size: int = 512
    num_heads: int = 8
    q_lora_rank: int | None = 96
    kv_lora_rank: int = 64
    nope: int = 32
    rope: int = 16
    value: int = 32
    num_kv_heads: int = 4
    head_dim: int = 32
    draft_vocab_size: int | None = None
    num_features: int = 3
    prefix: str = "midlayer."
    has_embedding: bool = False
    has_head: bool = True
    has_t2d: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    legacy_norm_names: bool = False

    @property
    def head_size(self) -> int:
        return self.draft_vocab_size or self.vocab_size


K25_MLA = DraftShape("mla", 7168, 163840, 18432, 64, 1536, 512, 128, 64, 128)
K25_LLAMA = DraftShape("llama", 7168, 163840, 12288, 64, num_kv_heads=64, head_dim=128)


def attention_shapes(s: DraftShape) -> dict[str, tuple[int, ...]]:
    two = 2 * s.hidden_size
    if s.style == "llama":
        kv = (s.num_kv_heads * s.head_dim, two)
        out = (s.hidden_size, s.num_heads * s.head_dim)
        return {"q_proj": (s.num_heads * s.head_dim, two), "k_proj": kv, "v_proj": kv, "o_proj": out}
    q_rows = s.num_heads * (s.nope + s.rope)
    if s.q_lora_rank:
        queries = {"q_a_proj": (s.q_lora_rank, two), "q_a_layernorm": (s.q_lora_rank,)}
        queries["q_b_proj"] = (q_rows, s.q_lora_rank)
    else:
        queries = {"q_proj": (q_rows, two)}
    return queries | {
        "kv_a_proj_with_mqa": (s.kv_lora_rank + s.rope, two),
        "kv_a_layernorm": (s.kv_lora_rank,),
        "kv_b_proj": (s.num_heads * (s.nope + s.value), s.kv_lora_rank),
        "o_proj": (s.hidden_size, s.num_heads * s.value),
    }


def tensor_shapes(s: DraftShape) -> dict[str, tuple[int, ...]]:
    """Names of the float tensors in the file, and their shapes."""
    h, features = s.hidden_size, s.num_features * s.hidden_size
    shapes = {"fc.weight": (h, features), "norm.weight": (h,)}
    if s.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    if s.fc_norm:
        legacy = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
        names = legacy if s.legacy_norm_names else [f"fc_norm.{i}" for i in range(s.num_features)]
        shapes |= {f"{name}.weight": (h,) for name in names}
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("input_layernorm", "hidden_norm", "post_attention_layernorm"), (h,)
    )
    layer |= {f"self_attn.{name}": shape for name, shape in attention_shapes(s).items()}
    layer |= {f"mlp.{name}_proj": (s.intermediate_size, h) for name in ("gate", "up")}
    layer["mlp.down_proj"] = (h, s.intermediate_size)
    shapes |= {f"{s.prefix}{name}.weight": shape for name, shape in layer.items()}
    if s.has_embedding:
        shapes["embed_tokens.weight"] = (s.vocab_size, h)
    if s.has_head:
        shapes["lm_head.weight"] = (s.head_size, h)
    return shapes


def draft_config(s: DraftShape, layer_ids: tuple[int, ...] | None, convention: str | None, **changes: Any) -> dict:
    """config.json; `changes` replace keys, a value of None drops one."""
    config: dict[str, Any] = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if s.style == "mla" else "LlamaForCausalLMEagle3"],
        "model_type": "kimi_k2" if s.style == "mla" else "llama",
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_heads if s.style == "mla" else s.num_kv_heads,
        "vocab_size": s.vocab_size,
        "draft_vocab_size": s.draft_vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5 if s.style == "mla" else 1e-6,
        "rope_theta": 50000.0 if s.style == "mla" else 1e6,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    }
    if s.style == "mla":
        config |= {"q_lora_rank": s.q_lora_rank, "kv_lora_rank": s.kv_lora_rank, "qk_nope_head_dim": s.nope}
        config |= {"qk_rope_head_dim": s.rope, "v_head_dim": s.value}
    else:
        config["head_dim"] = s.head_dim
    eagle = {"eagle_aux_hidden_state_layer_ids": layer_ids and list(layer_ids)}
    eagle["eagle_aux_hidden_state_convention"] = convention
    config["eagle_config"] = {key: value for key, value in eagle.items() if value is not None}
    config |= {name: True for name in ("norm_before_fc", "fc_norm") if getattr(s, name)}
    return {key: value for key, value in (config | changes).items() if value is not None}


def _float(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return 0.6 + 0.8 * torch.rand(shape, generator=generator)
    gain = 4.0 if name == "lm_head.weight" else shape[1] ** 0.5 if name == "embed_tokens.weight" else 1.0
    return torch.randn(shape, generator=generator) * gain / shape[1] ** 0.5


def vocabulary_tensors(s: DraftShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """d2t of a random choice of target ids where the vocabulary is reduced, and t2d where wanted."""
    if not s.draft_vocab_size:
        return {}
    ids = torch.randperm(s.vocab_size, generator=generator)[: s.draft_vocab_size].sort().values
    tensors = {"d2t": ids - torch.arange(s.draft_vocab_size)}
    if s.has_t2d:
        tensors["t2d"] = torch.zeros(s.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def write_draft(
    directory: str | Path,
    shape: DraftShape | None = None,
    *,
    layer_ids: tuple[int, ...] | None = (1, 2, 4),
    convention: str | None = "input",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    sparse: bool = False,
    tensors: dict[str, torch.Tensor | None] | None = None,
    **config_changes: Any,
) -> Path:
    """A draft's directory. The default shape and layers fit the bundled tiny checkpoint. `tensors` replace or add some,
    None drops one; `config_changes` replace keys of config.json, None drops one."""
    shape, directory = shape or DraftShape(), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = draft_config(shape, layer_ids, convention, **config_changes)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if sparse:
        _write_sparse(directory / "model.safetensors", shape)
        return directory
    generator = torch.Generator().manual_seed(seed)
    held: dict[str, torch.Tensor | None] = {
        name: _float(name, size, generator).to(dtype) for name, size in tensor_shapes(shape).items()
    }
    held |= vocabulary_tensors(shape, generator) | (tensors or {})
    save_file({name: t for name, t in held.items() if t is not None}, directory / "model.safetensors")
    return directory


def _write_sparse(file: Path, s: DraftShape) -> None:
    """A safetensors file of bfloat16 whose data is a hole."""
    kinds = {name: (shape, torch.bfloat16) for name, shape in tensor_shapes(s).items()}
    if s.draft_vocab_size:
        kinds |= {"d2t": ((s.draft_vocab_size,), torch.int64), "t2d": ((s.vocab_size,), torch.bool)}
    header, end = {}, 0
    for name, (shape, dtype) in kinds.items():
        code, size = _CODES[dtype]
        start, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
