"""Every tensor of a Kimi-K2.5 checkpoint from its config.json alone: name, type, shape, and the file it stands in.

Written from the description of the checkpoint, not from the model's own specs, so that each is a check of the other.
Knows no weight. Files 1 to 61 hold a decoder layer each, then embedding, head and final norm, the projector, and the
vision tower.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from models.kimi_k25.config import KimiConfig

PREFIX = "language_model."
GROUP_SIZE = 32
_BYTES = {"F32": 4, "I32": 4, "BF16": 2}
_FILE_ORDER = ("F32", "I32", "BF16")  # as safetensors writes: the wider type first, names of a type sorted


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """role: what its values are: "weight", "norm", "bias", "words", "scale" or "shape". fan_in: inputs of the product
    it belongs to, 1 where there is none. values: those of a "shape"."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    fan_in: int = 1
    values: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True)
class PlannedFile:
    """Tensors in the order of their data."""

    name: str
    tensors: list[PlannedTensor]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of the tensors alone."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def header(self) -> bytes:
        """What stands before the data: its length as 8 bytes, then JSON filled up with blanks to whole 8 bytes."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"} | self.metadata}
        end = 0
        for tensor in self.tensors:
            start, end = end, end + tensor.num_bytes
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def plan_files(
    raw: dict[str, Any], num_files: int | None = None, metadata: dict[str, str] | None = None
) -> list[PlannedFile]:
    """The files of the checkpoint that `raw`, the dict of config.json, describes.

    num_files: None for the checkpoint's own split, or at most so many files of about as many bytes each. Raises
    ValueError."""
    parts = list(_parts(raw))
    if num_files is not None:
        parts = _even(parts, num_files)
    names = [f"model-{number:05d}-of-{len(parts):06d}.safetensors" for number in range(1, len(parts) + 1)]
    return [PlannedFile(name, _ordered(part), metadata or {}) for name, part in zip(names, parts, strict=True)]


def _ordered(tensors: Iterable[PlannedTensor]) -> list[PlannedTensor]:
    return sorted(tensors, key=lambda tensor: (_FILE_ORDER.index(tensor.dtype), tensor.name))


def _even(parts: list[list[PlannedTensor]], num_files: int) -> list[list[PlannedTensor]]:
    tensors = [tensor for part in parts for tensor in part]
    if not 1 <= num_files <= len(tensors):
        raise ValueError(f"{num_files} files cannot hold {len(tensors)} tensors; use 1 to {len(tensors)}.")
    total, start = sum(tensor.num_bytes for tensor in tensors), 0
    files: list[list[PlannedTensor]] = [[] for _ in range(num_files)]
    for tensor in tensors:
        files[start * num_files // total].append(tensor)
        start += tensor.num_bytes
    return [file for file in files if file]


def _parts(raw: dict[str, Any]) -> Iterator[list[PlannedTensor]]:
    """What stands together in a file of the real checkpoint."""
    config = KimiConfig.from_dict(raw)
    for layer in range(config.num_hidden_layers):
        yield list(_layer(config, layer))
    width = config.hidden_size
    yield [
        PlannedTensor(f"{PREFIX}model.embed_tokens.weight", "BF16", (config.vocab_size, width), "weight"),
        PlannedTensor(f"{PREFIX}lm_head.weight", "BF16", (config.vocab_size, width), "weight", width),
        _norm(f"{PREFIX}model.norm", width),
    ]
    if (vision := raw.get("vision_config")) is not None:
        yield list(_projector(vision))
        yield list(_vision_tower(vision))


def _norm(name: str, width: int) -> PlannedTensor:
    return PlannedTensor(f"{name}.weight", "BF16", (width,), "norm")


def _linear(name: str, out: int, inputs: int) -> PlannedTensor:
    return PlannedTensor(f"{name}.weight", "BF16", (out, inputs), "weight", inputs)


def _feed_forward(name: str, width: int, inner: int) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of the three products of one feed-forward block."""
    yield f"{name}.gate_proj", inner, width
    yield f"{name}.up_proj", inner, width
    yield f"{name}.down_proj", width, inner


def _layer(c: KimiConfig, layer: int) -> Iterator[PlannedTensor]:
    name = f"{PREFIX}model.layers.{layer}"
    yield _norm(f"{name}.input_layernorm", c.hidden_size)
    yield _norm(f"{name}.post_attention_layernorm", c.hidden_size)
    yield from _attention(c, f"{name}.self_attn")
    if c.is_dense(layer):
        for product in _feed_forward(f"{name}.mlp", c.hidden_size, c.intermediate_size):
            yield _linear(*product)
    else:
        yield from _mixture(c, f"{name}.mlp")


def _attention(c: KimiConfig, name: str) -> Iterator[PlannedTensor]:
    heads, rope = c.num_attention_heads, c.qk_rope_head_dim
    queries, query_width = heads * (c.qk_nope_head_dim + rope), c.q_lora_rank or c.hidden_size
    if c.q_lora_rank:
        yield _linear(f"{name}.q_a_proj", c.q_lora_rank, c.hidden_size)
        yield _norm(f"{name}.q_a_layernorm", c.q_lora_rank)
    yield _linear(f"{name}.q_b_proj" if c.q_lora_rank else f"{name}.q_proj", queries, query_width)
    yield _linear(f"{name}.kv_a_proj_with_mqa", c.kv_lora_rank + rope, c.hidden_size)
    yield _norm(f"{name}.kv_a_layernorm", c.kv_lora_rank)
    yield _linear(f"{name}.kv_b_proj", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield _linear(f"{name}.o_proj", c.hidden_size, heads * c.v_head_dim)


def _mixture(c: KimiConfig, name: str) -> Iterator[PlannedTensor]:
    experts, inner = c.n_routed_experts, c.moe_intermediate_size
    yield _linear(f"{name}.gate", experts, c.hidden_size)
    yield PlannedTensor(f"{name}.gate.e_score_correction_bias", "F32", (experts,), "bias")
    if c.n_shared_experts:
        for product in _feed_forward(f"{name}.shared_experts", c.hidden_size, inner * c.n_shared_experts):
            yield _linear(*product)
    for expert in range(experts):
        for product in _feed_forward(f"{name}.experts.{expert}", c.hidden_size, inner):
            yield from _packed(*product) if c.is_quantized else (_linear(*product),)


def _packed(name: str, out: int, inputs: int) -> Iterator[PlannedTensor]:
    """Eight columns a word, a scale for each group of 32 columns, and the shape of the whole."""
    if inputs % GROUP_SIZE:
        raise ValueError(f"{name}: {inputs} input columns are not whole groups of {GROUP_SIZE}.")
    yield PlannedTensor(f"{name}.weight_packed", "I32", (out, inputs // 8), "words")
    yield PlannedTensor(f"{name}.weight_scale", "BF16", (out, inputs // GROUP_SIZE), "scale", inputs)
    yield PlannedTensor(f"{name}.weight_shape", "I32", (2,), "shape", values=(out, inputs))


def _affine(name: str, shape: tuple[int, ...], role: str = "weight") -> Iterator[PlannedTensor]:
    """A weight and its bias."""
    fan_in = math.prod(shape[1:])
    yield PlannedTensor(f"{name}.weight", "BF16", shape, role, fan_in)
    yield PlannedTensor(f"{name}.bias", "BF16", shape[:1], "bias")


def _projector(vision: dict[str, Any]) -> Iterator[PlannedTensor]:
    height, width = vision["merge_kernel_size"]
    merged = vision["mm_hidden_size"] * height * width
    yield from _affine("mm_projector.pre_norm", (vision["mm_hidden_size"],), "norm")
    yield from _affine("mm_projector.proj.0", (merged, merged))
    yield from _affine("mm_projector.proj.2", (vision["text_hidden_size"], merged))


def _vision_tower(vision: dict[str, Any]) -> Iterator[PlannedTensor]:
    width, inner, patch = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["patch_size"]
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    yield from _affine("vision_tower.patch_embed.proj", (width, 3, patch, patch))
    yield PlannedTensor("vision_tower.patch_embed.pos_emb.weight", "BF16", grid, "weight", width)
    for block in range(vision["vt_num_hidden_layers"]):
        name = f"vision_tower.encoder.blocks.{block}"
        for norm in ("norm0", "norm1"):
            yield from _affine(f"{name}.{norm}", (width,), "norm")
        shapes = {
            "wqkv": (3 * width, width),
            "wo": (width, width),
            "mlp.fc0": (inner, width),
            "mlp.fc1": (width, inner),
        }
        for part, shape in shapes.items():
            yield from _affine(f"{name}.{part}", shape)
    yield from _affine("vision_tower.encoder.final_layernorm", (width,), "norm")
