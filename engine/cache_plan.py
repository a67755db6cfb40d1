"""How many blocks of KV cache there are, and how long a request may be."""

from __future__ import annotations

from typing import Any

import torch

from engine.config import ConfigError, EngineConfig
from engine.kernels.kv_layout import LAYOUTS
from engine.model_files import ModelFiles

BLOCK_SIZE = 64
CPU_CACHE_BYTES = 512 * 2**20


def known_bytes(config: EngineConfig) -> int | None:
    """The memory for the KV cache where it is known without loading; None on a GPU, where it is measured."""
    if config.kv_cache_memory_gb is not None:
        return int(config.kv_cache_memory_gb * 2**30)
    return CPU_CACHE_BYTES if config.device == "cpu" else None


def block_bytes(config: EngineConfig, files: ModelFiles, model: Any, drafter: Any = None) -> int:
    """Of the target's cache and the draft's, which has the same blocks and numbers of the model's type."""
    width, dtype = row_shape(config, model)
    row_bytes = files.model_config.num_hidden_layers * width * dtype.itemsize
    row_bytes += 0 if drafter is None else drafter.cache_width * getattr(torch, config.dtype).itemsize
    return row_bytes * BLOCK_SIZE


def row_shape(config: EngineConfig, model: Any) -> tuple[int, torch.dtype]:
    """(elements, their type) of a token's row in a layer of the target's cache."""
    layout = LAYOUTS[config.kv_cache_dtype]
    width = layout.width(model.latent_width, model.cache_width - model.latent_width)
    return width, layout.dtype(getattr(torch, config.dtype))


def plan(config: EngineConfig, files: ModelFiles, block_bytes: int, budget: int, fitting: int) -> tuple[int, int]:
    """(longest request in tokens, number of blocks) where `fitting` blocks fit the budget of every rank."""
    wanted = config.max_model_len or files.model_config.max_position_embeddings
    if wanted > files.model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {files.model_config.max_position_embeddings} positions of "
            "the model; lower it."
        )
    most_useful = config.max_num_seqs * -(-wanted // BLOCK_SIZE) + 1
    num_blocks = min(fitting, most_useful)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache may use {budget} bytes, but one block of {BLOCK_SIZE} tokens takes {block_bytes} "
            "and 2 are needed; raise kv_cache_memory_gb."
        )
    longest = min(wanted, (num_blocks - 1) * BLOCK_SIZE)
    if longest < wanted and config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={wanted} needs {-(-wanted // BLOCK_SIZE)} KV blocks, but only {num_blocks - 1} of "
            f"{block_bytes} bytes fit; lower max_model_len to {longest} or raise kv_cache_memory_gb."
        )
    return longest, num_blocks
