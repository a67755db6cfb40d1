"""Bytes of one rank's share of the model, from its config alone: what the layers allocate, without building one."""

from __future__ import annotations

import torch

from engine.comm.parallel_state import ParallelState
from engine.layers.quant import GROUP_SIZE, PACKED_COLUMNS, packs
from models.kimi_k25.config import KimiConfig

_SCALE_BYTES = 2  # bfloat16
_BIAS_BYTES = 4  # the router's stays float32


def held_as(stored: str, config: KimiConfig, parallel: ParallelState, reads_packed: bool) -> str:
    """The storage, a key of EXPERT_STORAGE, for experts that are `stored` as such: packed ones stay so where the
    kernels can read them."""
    fits = packs(config.hidden_size, config.moe_intermediate_size, parallel)
    return "packed_int4" if stored == "int4" and reads_packed and fits else stored


def share_bytes(
    config: KimiConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    *,
    is_int4: bool,
    reads_packed: bool,
    shards_tokens: bool,
) -> dict[str, int]:
    """Kind -> bytes of this rank's weights, all layers together; any rank's, since all hold as much.

    is_int4: the checkpoint's experts are packed; the rest as `load_model` finds it in the kernels and the dispatcher.
    Raises ValueError with the sum where the model does not divide over the ranks."""
    size, experts = dtype.itemsize, len(config.moe_layers)
    dense = config.num_hidden_layers - experts
    storage = held_as("int4" if is_int4 else "float", config, parallel, reads_packed)
    attention = _attention(config, parallel)
    shared = config.moe_intermediate_size * config.n_shared_experts
    if shared and experts and not shards_tokens:
        shared = _count(parallel.split(shared, "shared expert columns"))
    dense_width = _count(parallel.split(config.intermediate_size, "feed-forward columns")) if dense else 0
    router = config.n_routed_experts * (config.hidden_size * size + _BIAS_BYTES)
    vocabulary = -(-config.vocab_size // parallel.tp) * config.hidden_size
    return {
        "attention": config.num_hidden_layers * attention * size,
        "dense layers": dense * 3 * config.hidden_size * dense_width * size,
        "shared expert": experts * 3 * config.hidden_size * shared * size,
        "routed experts": experts * _routed(config, parallel, storage, size) if experts else 0,
        "router": experts * router,
        "embedding and head": (2 * vocabulary + config.hidden_size) * size,
    }


def _count(columns: slice) -> int:
    return columns.stop - columns.start


def _attention(c: KimiConfig, parallel: ParallelState) -> int:
    """Parameters of a layer, the norms before and after it included; the first products are whole on every rank."""
    heads, rope = _count(parallel.split(c.num_attention_heads, "attention heads")), c.qk_rope_head_dim
    queries = heads * (c.qk_nope_head_dim + rope)
    latent = c.kv_lora_rank * (1 + heads * (c.qk_nope_head_dim + c.v_head_dim)) + c.hidden_size * (
        c.kv_lora_rank + rope
    )
    if c.q_lora_rank:
        query = c.q_lora_rank * (c.hidden_size + 1 + queries)
    else:
        query = c.hidden_size * queries
    return 2 * c.hidden_size + query + latent + heads * c.v_head_dim * c.hidden_size


def _routed(c: KimiConfig, parallel: ParallelState, storage: str, size: int) -> int:
    """Bytes of a layer's experts on this rank."""
    group = {"float": 1, "int4": GROUP_SIZE, "packed_int4": PACKED_COLUMNS}[storage]
    columns = _count(parallel.expert_columns(c.moe_intermediate_size, group))
    numbers = 3 * c.hidden_size * columns * len(parallel.expert_range(c.n_routed_experts))
    if storage == "packed_int4":
        return numbers // 2 + numbers // GROUP_SIZE * _SCALE_BYTES
    return numbers * size
