"""The text model's hyper-parameters under the checkpoint's names, read strictly from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.json_files import token_ids
from engine.layers.hyper_parameters import count, flag, number, rope_parameters
from engine.layers.rotary import RopeParameters

_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class KimiConfig:
    """`low_rank_norm_eps` is the epsilon of q_a_layernorm and kv_a_layernorm: 1e-6 as in the checkpoint's own code,
    whatever rms_norm_eps says. `is_quantized` is what the config claims; of files their tensors tell."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    low_rank_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope: RopeParameters
    eos_token_ids: tuple[int, ...]
    is_quantized: bool

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> KimiConfig:
        """Reads config.json, nested under text_config or not. Raises ValueError naming the key at fault."""
        text = config.get("text_config", config)
        if not isinstance(text, dict):
            raise ValueError("text_config must be an object.")
        _refuse_unknown_math(text)
        values = {name: count(text, name) for name in _COUNTS}
        if values["num_experts_per_tok"] > values["n_routed_experts"]:
            raise ValueError(
                f"config.json: num_experts_per_tok={values['num_experts_per_tok']} is more than "
                f"n_routed_experts={values['n_routed_experts']}."
            )
        return cls(
            **values,
            q_lora_rank=None if text.get("q_lora_rank") is None else count(text, "q_lora_rank"),
            n_shared_experts=number(text, "n_shared_experts", 0, kind=int) if text.get("n_shared_experts") else 0,
            first_k_dense_replace=number(text, "first_k_dense_replace", 0, kind=int),
            norm_topk_prob=flag(text, "norm_topk_prob", True),
            routed_scaling_factor=number(text, "routed_scaling_factor", 1.0),
            rms_norm_eps=number(text, "rms_norm_eps", 1e-6),
            low_rank_norm_eps=number(text, "low_rank_norm_eps", 1e-6),
            rope=rope_parameters(text),
            eos_token_ids=_eos_ids(text, config),
            is_quantized=_is_quantized(text.get("quantization_config") or config.get("quantization_config")),
        )

    @property
    def moe_layers(self) -> range:
        return range(min(self.first_k_dense_replace, self.num_hidden_layers), self.num_hidden_layers)

    @property
    def latent_width(self) -> int:
        """Numbers of a token in a layer's KV cache that are the latent's; they come first and may be kept in fewer
        bits."""
        return self.kv_lora_rank

    @property
    def cache_width(self) -> int:
        """All numbers of a token in a layer's KV cache: the latent and the roped key shared by all heads."""
        return self.latent_width + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        return layer < self.first_k_dense_replace


def _refuse_unknown_math(text: dict[str, Any]) -> None:
    """Settings under which this model would compute something else."""
    wanted = {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "hidden_act": ("silu",),
        "n_group": (1,),
        "topk_group": (1,),
        "moe_layer_freq": (1,),
        "attention_bias": (False,),
        "rope_interleave": (True,),
        "tie_word_embeddings": (False,),
    }
    for name, allowed in wanted.items():
        value = text.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"config.json: {name}={value!r} is not supported; this model computes {allowed[0]!r}.")


def _is_quantized(quantization: Any) -> bool:
    return isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors"


def _eos_ids(text: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    value = text.get("eos_token_id", config.get("eos_token_id"))
    return token_ids(value, "config.json: eos_token_id", text["vocab_size"])
