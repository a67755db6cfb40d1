"""The implementation that is not ours: transformers' two classes of this architecture, float32, eager attention.

Weights come from the directory by this file's own reader. An INT4 weight is (nibble - 8) * scale computed in float32;
that product has at most 11 significant bits, so float32 holds it exactly, and it stays float32 here as it does in an
engine that runs in float32. BF16 tensors are widened without loss.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    Kimi_K25Config,
    Kimi_K25ForConditionalGeneration,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

PROMPT_LENGTHS = (1, 5, 64, 65, 200)
NUM_GREEDY = 32
VT_NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "patch_size": "patch_size",
    "merge_kernel_size": "merge_kernel_size",
}


def prompts() -> list[list[int]]:
    """One prompt of each length; no prompt is the start of another."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 320, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """int32 words [out, in / 8] and scales [out, in / 32] to float32 [out, in]."""
    columns = [((packed >> (4 * k)) & 15).float() - 8 for k in range(8)]
    values = torch.stack(columns, dim=-1).flatten(1)
    return values * scale.float().repeat_interleave(values.shape[1] // scale.shape[1], dim=1)


def read_tensors(directory: str | Path, unpack=unpack_int4) -> dict[str, torch.Tensor]:
    """All tensors of all files in float32, with `weight` in the place of packed words, scales and shapes."""
    raw = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            raw |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (not a dict)
    tensors = {}
    for name, tensor in raw.items():
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            tensors[stem] = unpack(tensor, raw[stem + "_scale"])
        elif not name.endswith((".weight_scale", ".weight_shape")):
            tensors[name] = tensor.float()
    return tensors


def _read_config(directory: str | Path) -> dict:
    return json.loads((Path(directory) / "config.json").read_text())


def _text_config(config: dict) -> dict:
    text = dict(config.get("text_config", config))
    for key in ("quantization_config", "dtype", "torch_dtype", "architectures", "auto_map"):
        text.pop(key, None)
    return {**text, "model_type": "deepseek_v3"}


def _load(cls, config, tensors: dict[str, torch.Tensor]):
    """Through transformers' own conversion of names, so a wrong name in the checkpoint is found out."""
    model, info = cls.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    wrong = {k: v for k, v in info.items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if wrong:
        raise AssertionError(f"transformers' {cls.__name__} could not load the checkpoint as it stands: {wrong}")
    return model.eval()


def deepseek_v3(directory: str | Path, unpack=unpack_int4) -> DeepseekV3ForCausalLM:
    """The text model alone; vision tensors and the prefix are taken off."""
    config = DeepseekV3Config(**_text_config(_read_config(directory)))
    tensors = {k.removeprefix("language_model."): v for k, v in read_tensors(directory, unpack).items()}
    text = {k: v for k, v in tensors.items() if k.startswith(("model.", "lm_head."))}
    return _load(DeepseekV3ForCausalLM, config, text)


def kimi_k25(directory: str | Path) -> Kimi_K25ForConditionalGeneration:
    """The multimodal class; the checkpoint must have been built with `vision=True`."""
    config = _read_config(directory)
    vision = {new: config["vision_config"][old] for old, new in VT_NAMES.items()}
    special = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")}
    kimi = Kimi_K25Config(
        text_config=_text_config(config),
        vision_config=vision,
        projection_hidden_size=config["vision_config"]["mm_hidden_size"],
        image_token_id=config["media_placeholder_token_id"],
        **special,
    )
    return _load(Kimi_K25ForConditionalGeneration, kimi, read_tensors(directory))


@torch.inference_mode()
def logprobs(model, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] in float32: row t is the distribution of the token after position t."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


@torch.inference_mode()
def greedy(model, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """`num_tokens` greedy tokens after each prompt, one prompt at a time, never stopping early."""
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, use_cache=True, pad_token_id=0)
    model.generation_config = settings  # a fresh one: no end-of-sequence token ends the comparison
    return [model.generate(torch.tensor([ids]), generation_config=settings)[0, len(ids) :].tolist() for ids in prompts]


def low_rank_norms(model) -> list[torch.nn.Module]:
    """The q_a and kv_a norms of every layer, whose epsilon is the class default and not the config's."""
    return [m for name, m in model.named_modules() if name.endswith(("q_a_layernorm", "kv_a_layernorm"))]


def routers(model) -> list[torch.nn.Module]:
    return [m for m in model.modules() if isinstance(m, DeepseekV3TopkRouter)]


def router_scores(model, ids: list[int]) -> list[torch.Tensor]:
    """Per MoE layer the sigmoid scores [T, E], before the correction bias."""
    seen = []
    hooks = [r.register_forward_hook(lambda _m, _i, out: seen.append(out[0].sigmoid())) for r in routers(model)]
    try:
        logprobs(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
