"""An EAGLE-3 draft's hyper-parameters under its checkpoint's names, read strictly from config.json.

Nothing is taken from the target: rotary settings, epsilon and storage are the draft's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draft.base import TargetShape
from draft.eagle3.layer_ids import LayerIds
from draft.eagle3.spellings import flattened
from engine.layers.hyper_parameters import count, flag, number, rope_parameters, short
from engine.layers.rotary import RopeParameters, yarn_mscale

NO_LIMIT = 2**31 - 1

_PLAIN = {
    "hidden_act": ("silu",),
    "num_hidden_layers": (1,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "rope_interleave": (True,),
    "partial_rotary_factor": (1.0,),
    "use_sliding_window": (False,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
}
"""Settings that may be left out; under any other value the draft would compute something else."""


@dataclass(frozen=True)
class LatentHeads:
    """MLA. norm_eps is that of the low-rank norms: 1e-6 as in the target's code, whatever rms_norm_eps says."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float


@dataclass(frozen=True)
class FullHeads:
    """Llama's attention: num_heads queries over num_kv_heads keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Eagle3Config:
    """norm_before_residual: attention's output is added to the normed state instead of the state. norm_before_fc: one
    norm over all features. fc_norm: one for each layer's. norm_output: the final norm's output is what the draft reads
    next instead of its input. draft_vocab_size: the head's width, vocab_size where the checkpoint says nothing."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    intermediate_size: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeParameters
    heads: LatentHeads | FullHeads
    layer_ids: LayerIds
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    tie_word_embeddings: bool

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Eagle3Config:
        """Reads config.json in any of its spellings. Raises ValueError naming the key at fault."""
        style = HEADS[_architecture(config)]
        flat = flattened(config)
        _refuse_unknown_math(flat)
        hidden_size, vocab_size = count(flat, "hidden_size"), count(flat, "vocab_size")
        inner = "intermediate_size_mlp" if flat.get("model_type") == "llama4_text" else "intermediate_size"
        limit = flat.get("max_position_embeddings")
        return cls(
            hidden_size=hidden_size,
            target_hidden_size=_count_or(flat, "target_hidden_size", hidden_size),
            vocab_size=vocab_size,
            draft_vocab_size=_draft_vocab_size(flat, vocab_size),
            intermediate_size=count(flat, inner),
            rms_norm_eps=number(flat, "rms_norm_eps", 1e-6),
            max_positions=NO_LIMIT if limit is None else min(count(flat, "max_position_embeddings"), NO_LIMIT),
            rope=_rope(flat),
            heads=style(flat, hidden_size),
            layer_ids=LayerIds.from_dict(flat),
            norm_before_residual=flag(flat, "norm_before_residual", False),
            norm_before_fc=flag(flat, "norm_before_fc", False),
            fc_norm=flag(flat, "fc_norm", False),
            norm_output=flag(flat, "norm_output", False),
            tie_word_embeddings=flag(flat, "tie_word_embeddings", False),
        )

    @property
    def num_features(self) -> int:
        return self.layer_ids.num_states

    @property
    def has_reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    def check_target(self, target: TargetShape) -> None:
        """Raises ValueError where the draft was made for another target."""
        for name, own, wanted in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("width of its target (target_hidden_size, or hidden_size)", self.target_hidden_size, target.hidden_size),
        ):
            if own != wanted:
                raise ValueError(f"the draft's {name} is {own}, the target's {wanted}; it was made for another target.")
        if self.hidden_size != target.hidden_size:
            raise ValueError(
                f"the draft's hidden_size is {self.hidden_size}, the target's {target.hidden_size}; a draft of another "
                "width is not supported."
            )
        self.layer_ids.before(target.num_layers)


def _latent_heads(flat: dict[str, Any], hidden_size: int) -> LatentHeads:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return LatentHeads(
        num_heads=count(flat, "num_attention_heads"),
        q_lora_rank=None if flat.get("q_lora_rank") is None else count(flat, "q_lora_rank"),
        norm_eps=number(flat, "low_rank_norm_eps", 1e-6),
        **{name: count(flat, name) for name in sizes},
    )


def _full_heads(flat: dict[str, Any], hidden_size: int) -> FullHeads:
    num_heads = count(flat, "num_attention_heads")
    num_kv_heads = _count_or(flat, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}."
        )
    if flat.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config.json lacks head_dim, and hidden_size={hidden_size} is no multiple of num_attention_heads="
            f"{num_heads}."
        )
    head_dim = _count_or(flat, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim={head_dim} must be even, as rotary pairs are.")
    return FullHeads(num_heads, num_kv_heads, head_dim)


HEADS: dict[str, Callable[[dict[str, Any], int], LatentHeads | FullHeads]] = {
    "LlamaForCausalLMEagle3": _full_heads,
    "Eagle3LlamaForCausalLM": _full_heads,
    "LlamaForCausalLM": _full_heads,
    "Eagle3Speculator": _full_heads,
    "Eagle3DraftModel": _full_heads,
    "Eagle3DeepseekV2ForCausalLM": _latent_heads,
    "Eagle3DeepseekV3ForCausalLM": _latent_heads,
}
"""Architecture -> the reader of its attention's sizes."""


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in HEADS:
        raise ValueError(f"config.json: architectures must be one of {', '.join(HEADS)}, not {short(names)}.")
    return names[0]


def _refuse_unknown_math(flat: dict[str, Any]) -> None:
    for name, allowed in _PLAIN.items():
        value = flat.get(name)
        if value is not None and value not in allowed:
            raise ValueError(f"config.json: {name}={short(value)} is not supported; a draft computes {allowed[0]!r}.")
    if flat.get("sliding_window") is not None and flat.get("use_sliding_window") is None:
        raise ValueError("config.json: sliding_window is not supported; the draft's attention sees all positions.")
    if flag(flat, "norm_before_fc", False) and flag(flat, "fc_norm", False):
        raise ValueError("config.json: norm_before_fc and fc_norm are both true; a draft norms its features once.")


def _count_or(flat: dict[str, Any], name: str, default: int) -> int:
    return default if flat.get(name) is None else count(flat, name)


def _draft_vocab_size(flat: dict[str, Any], vocab_size: int) -> int:
    size = _count_or(flat, "draft_vocab_size", vocab_size)
    if size > vocab_size:
        raise ValueError(f"config.json: draft_vocab_size={size} is more than vocab_size={vocab_size}.")
    if size < vocab_size and flag(flat, "tie_word_embeddings", False):
        raise ValueError("config.json: tie_word_embeddings needs a head over the whole vocabulary.")
    return size


def _rope(flat: dict[str, Any]) -> RopeParameters:
    rope = rope_parameters(flat)
    scaling = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    if rope.factor > 1.0 and scaling.get("original_max_position_embeddings") is None:
        raise ValueError("config.json: yarn needs original_max_position_embeddings, and engines disagree without it.")
    if scaling.get("truncate") not in (None, True):
        raise ValueError("config.json: yarn with truncate=false is not supported.")
    magnitude = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    wanted = number(scaling, "attention_factor", magnitude)
    if abs(wanted - magnitude) > 1e-6:
        raise ValueError(f"config.json: attention_factor={wanted:g} is not supported; yarn gives {magnitude:g}.")
    return rope
