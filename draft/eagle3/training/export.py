"""Writes a trained draft as a checkpoint directory, and reads one back into the training model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft.eagle3.training.model import DraftModel, DraftShape

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def config_of(shape: DraftShape) -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(shape.feature_layers),
            "eagle_aux_hidden_state_convention": "input",
        },
    }


def shape_of(config: dict) -> DraftShape:
    return DraftShape(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        draft_vocab_size=config["draft_vocab_size"],
        heads=config["num_attention_heads"],
        head_width=config["head_dim"],
        mlp_width=config["intermediate_size"],
        feature_layers=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        rope_theta=config["rope_theta"],
        max_positions=config["max_position_embeddings"],
        eps=config["rms_norm_eps"],
    )


def export(model: DraftModel, folder: Path) -> int:
    """Writes config.json and model.safetensors (weights BF16, d2t int64); returns the bytes of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of(model.shape), indent=2)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    tensors = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    part = folder / (WEIGHTS + ".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(folder / WEIGHTS)
    return (folder / WEIGHTS).stat().st_size


def load(folder: Path, embedding: Tensor) -> DraftModel:
    """The exported draft in float32 on the CPU; `embedding` is the target's. Raises RuntimeError for tensors that do
    not fit the config."""
    shape = shape_of(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    model = DraftModel(shape, embedding.float().cpu())
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval()
