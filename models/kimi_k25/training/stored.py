"""A checkpoint in the tiny layout back as the training model, its experts dequantised."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.kimi_k25.training.architecture import Architecture
from models.kimi_k25.training.attention import Attention
from models.kimi_k25.training.export import PREFIX
from models.kimi_k25.training.model import TinyKimi
from models.kimi_k25.training.quantization import dequantize, unpack_int4


def read_architecture(folder: Path) -> Architecture:
    """The sizes in config.json; a key that it lacks keeps its default."""
    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))["text_config"]
    scaling = text["rope_scaling"]
    known = {f.name for f in fields(Architecture)}
    sizes = {key: value for key, value in (scaling | text).items() if key in known}
    return Architecture(**sizes, rope_factor=scaling["factor"])


def load_stored(folder: Path, attention: Attention) -> TinyKimi:
    """The checkpoint's weights as float32 numbers of BF16 precision. Raises RuntimeError for missing or odd tensors."""
    architecture = read_architecture(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    stored: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored |= load_file(folder / file)
    stored = {name.removeprefix(PREFIX).removeprefix("model."): tensor for name, tensor in stored.items()}
    state = {name: tensor.float() for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(architecture.first_k_dense_replace, architecture.num_hidden_layers):
        prefix = f"layers.{layer}.mlp."
        state[prefix + "gate"] = state.pop(prefix + "gate.weight")
        state[prefix + "correction_bias"] = state.pop(prefix + "gate.e_score_correction_bias")
        for projection in ("gate", "up", "down"):
            names = [f"{prefix}experts.{e}.{projection}_proj.weight" for e in range(architecture.n_routed_experts)]
            state[f"{prefix}experts_{projection}"] = torch.stack([_expert(stored, name) for name in names])
    model = TinyKimi(architecture, attention)
    model.load_state_dict(state)
    return model.eval()


def _expert(stored: dict[str, Tensor], name: str) -> Tensor:
    return dequantize(unpack_int4(stored[name + "_packed"]), stored[name + "_scale"]).float()
