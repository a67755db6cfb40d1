"""The other side of the cpu comparison: transformers' own model on the same checkpoint, its experts dequantised."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from safetensors import safe_open

PREFIX = "language_model."


def dequantise(packed_OW: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """INT4 words [out, in / 8] and scales [out, in / group] to float32 [out, in]: (nibble - 8) * scale."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (packed_OW.unsqueeze(-1) >> shifts) & 15
    groups = (nibbles.flatten(1) - 8).unflatten(1, (scale_OG.shape[1], -1)).float()
    return (groups * scale_OG.float().unsqueeze(-1)).flatten(1)


def read_text_model(directory: Path) -> dict[str, torch.Tensor]:
    """Float32 tensors of the text model under the names that transformers uses; vision tensors are left out."""
    raw: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (a reader is not a dict)
                short = name.removeprefix(PREFIX)
                if short.startswith(("model.", "lm_head.")):
                    raw[short] = reader.get_tensor(name)
    tensors = {}
    for name, tensor in raw.items():
        stem, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            tensors[f"{stem}.weight"] = dequantise(tensor, raw[f"{stem}.weight_scale"])
        elif kind not in ("weight_scale", "weight_shape"):
            tensors[name] = tensor.float()
    return tensors


def load_transformers(directory: Path):
    """`DeepseekV3ForCausalLM` in float32 with transformers' default attention and experts.

    Raises ValueError if the checkpoint does not fill the model exactly.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # its bar would stand in the middle of our table
    config = json.loads((directory / "config.json").read_text())
    text = {k: v for k, v in config.get("text_config", config).items() if k not in ("quantization_config", "auto_map")}
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        None,
        config=DeepseekV3Config(**{**text, "model_type": "deepseek_v3"}),
        state_dict=read_text_model(directory),
        dtype=torch.float32,
        output_loading_info=True,
    )
    wrong = {k: sorted(map(str, info[k])) for k in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[k]}
    if wrong:
        raise ValueError(f"transformers cannot load {directory} as it stands: {wrong}.")
    return model.eval()


class TransformersArm:
    """Greedy decoding of a fixed number of tokens by `generate`, the prompts padded on the left."""

    def __init__(self, directory: Path, prompts: list[list[int]], num_tokens: int):
        from transformers import GenerationConfig

        self.model = load_transformers(directory)
        self.prompts = prompts
        self.settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, use_cache=True, pad_token_id=0)
        self.model.generation_config = self.settings  # no end-of-sequence token: both arms make every token
        self.num_tokens = num_tokens
        self.tokens: list[list[int]] = []

    def describe(self) -> dict[str, str]:
        config = self.model.config
        return {
            "attention": str(getattr(config, "_attn_implementation", "default")),
            "experts": str(getattr(config, "_experts_implementation", "default")),
        }

    @torch.inference_mode()
    def run(self, num_prompts: int) -> float:
        """Generates for the first `num_prompts` prompts; returns output tokens per second."""
        prompts = self.prompts[:num_prompts]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        start = time.perf_counter()
        out = self.model.generate(ids, attention_mask=mask, generation_config=self.settings)
        elapsed = time.perf_counter() - start
        self.tokens = out[:, width:].tolist()
        return num_prompts * self.num_tokens / elapsed
