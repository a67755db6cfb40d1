"""The tiny model's sizes and its config files, in the layout of the Kimi-K2.5 checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.tokenizer import KIMI_SPECIAL_OFFSETS, VISIBLE_MARKERS

NUM_RANKS = 3840
GROUP_SIZE = 32


@dataclass(frozen=True)
class Architecture:
    """Sizes under the names of the checkpoint's text_config. Head sizes and ranks are those of the full model."""

    vocab_size: int = NUM_RANKS + 256
    hidden_size: int = 256
    num_hidden_layers: int = 5
    first_k_dense_replace: int = 1
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    n_routed_experts: int = 32
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.827
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rms_norm_eps: float = 1e-5
    low_rank_norm_eps: float = 1e-6
    rope_theta: float = 50000.0
    rope_factor: float = 64.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale_all_dim: float = 1.0
    max_position_embeddings: int = 4096

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def special_id(self, name: str) -> int:
        return self.vocab_size - 256 + KIMI_SPECIAL_OFFSETS[name]

    def text_config(self) -> dict:
        own = {"low_rank_norm_eps", "rope_factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
        own |= {"mscale_all_dim"}
        sizes = {key: value for key, value in vars(self).items() if key not in own}
        return sizes | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "moe_layer_freq": 1,
            "ep_size": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
            "num_key_value_heads": self.num_attention_heads,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "num_nextn_predict_layers": 0,
            "pretraining_tp": 1,
            "use_cache": True,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "bos_token_id": self.special_id("[BOS]"),
            "eos_token_id": self.special_id("[EOS]"),
            "pad_token_id": self.special_id("[PAD]"),
            "rope_scaling": {
                "type": "yarn",
                "factor": self.rope_factor,
                "original_max_position_embeddings": self.original_max_position_embeddings,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "mscale": 1.0,
                "mscale_all_dim": self.mscale_all_dim,
            },
            "quantization_config": _quantization_config(),
        }

    def config(self) -> dict:
        """The whole config.json; there is no vision tower, so no vision_config."""
        return {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "bos_token_id": self.special_id("[BOS]"),
            "eos_token_id": self.special_id("[EOS]"),
            "pad_token_id": self.special_id("[PAD]"),
            "ignore_index": -100,
            "media_placeholder_token_id": self.special_id("<|media_pad|>"),
            "tie_word_embeddings": False,
            "use_unified_vision_chunk": True,
            "video_placeholder": "<|kimi_k25_video_placeholder|>",
            "text_config": self.text_config(),
        }

    def generation_config(self) -> dict:
        """Cooler than Kimi's own 1.0: a model of this size wanders otherwise."""
        stops = ("<|im_end|>", "[EOS]", "[EOT]")
        return {
            "bos_token_id": self.special_id("[BOS]"),
            "eos_token_id": [self.special_id(name) for name in stops],
            "pad_token_id": self.special_id("[PAD]"),
            "do_sample": True,
            "temperature": 0.3,
            "top_p": 0.95,
            "max_length": self.max_position_embeddings,
        }

    def tokenizer_config(self) -> dict:
        first = self.vocab_size - 256
        added = {
            str(first + offset): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": name not in VISIBLE_MARKERS,
            }
            for name, offset in KIMI_SPECIAL_OFFSETS.items()
        }
        return {
            "added_tokens_decoder": added,
            "additional_special_tokens": [n for n in KIMI_SPECIAL_OFFSETS if n not in VISIBLE_MARKERS and n[0] == "<"],
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.max_position_embeddings,
            "tokenizer_class": "TikTokenTokenizer",
        }

    def write(self, folder: Path) -> None:
        """Writes config.json, generation_config.json and tokenizer_config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config", "generation_config", "tokenizer_config"):
            text = json.dumps(getattr(self, name)(), indent=2, ensure_ascii=False)
            (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def _quantization_config() -> dict:
    weights = {
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
    }
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": weights}
    ignored = [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": [*ignored, "re:vision_tower.*", "re:mm_projector.*"],
    }
