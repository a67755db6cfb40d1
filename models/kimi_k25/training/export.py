"""Writes the trained model as a Kimi-K2.5 checkpoint: BF16, with the routed experts as packed INT4."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.kimi_k25.training.model import MoE, TinyKimi
from models.kimi_k25.training.quantization import group_scales, pack_int4, quantize

PREFIX = "language_model."
NUM_SHARDS = 2
MAX_SHARD_BYTES = 16 * 2**20


def checkpoint_tensors(model: TinyKimi) -> dict[str, Tensor]:
    """Every tensor under its checkpoint name, on the CPU."""
    tensors: dict[str, Tensor] = {}
    moe_prefixes = {f"layers.{i}.mlp.": layer.mlp for i, layer in enumerate(model.layers) if layer.is_moe}
    for name, weight in model.named_parameters():
        moe = next((p for p in moe_prefixes if name.startswith(p) and "shared_experts" not in name), None)
        if moe is None:
            target = name if name.startswith("lm_head") else f"model.{name}"
            tensors[PREFIX + target] = _bf16(weight)
    for prefix, mlp in moe_prefixes.items():
        tensors |= {f"{PREFIX}model.{prefix}{name}": tensor for name, tensor in _moe_tensors(mlp).items()}
    return dict(sorted(tensors.items()))


def _bf16(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.bfloat16).cpu().contiguous()


def _moe_tensors(mlp: MoE) -> dict[str, Tensor]:
    tensors = {
        "gate.weight": _bf16(mlp.gate),
        "gate.e_score_correction_bias": mlp.correction_bias.float().cpu().clone(),
    }
    for projection in ("gate", "up", "down"):
        stacked = getattr(mlp, f"experts_{projection}").detach().float()
        for expert, weight in enumerate(stacked):
            name = f"experts.{expert}.{projection}_proj."
            scale = group_scales(weight)
            tensors[name + "weight_packed"] = pack_int4(quantize(weight, scale)).cpu().contiguous()
            tensors[name + "weight_scale"] = scale.cpu().contiguous()
            tensors[name + "weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
    return tensors


def export(model: TinyKimi, folder: Path) -> int:
    """Writes the shards and model.safetensors.index.json; returns the bytes of tensor data.

    Raises ValueError if a shard would pass `MAX_SHARD_BYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(model)
    weight_map: dict[str, str] = {}
    total = sum(t.nbytes for t in tensors.values())
    for number, names in enumerate(_shards(tensors, total / NUM_SHARDS), 1):
        file = f"model-{number:05d}-of-{NUM_SHARDS:06d}.safetensors"
        part = folder / (file + ".part")
        save_file({name: tensors[name] for name in names}, part, metadata={"format": "pt"})
        if part.stat().st_size > MAX_SHARD_BYTES:
            raise ValueError(f"{file} would have {part.stat().st_size} bytes, more than {MAX_SHARD_BYTES}.")
        part.chmod(0o644)
        part.replace(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total


def _shards(tensors: dict[str, Tensor], target: float) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size >= target and len(shards) < NUM_SHARDS:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    return shards
