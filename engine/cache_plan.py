"""How many blocks of KV cache there are, and how long a request may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import ConfigError, EngineConfig
from engine.kernels.kv_layout import LAYOUTS
from engine.model_files import ModelFiles

BLOCK_SIZE = 64
CPU_CACHE_BYTES = 512 * 2**20
GIB = 2**30
MARGIN_SHARE = 0.02


def margin_bytes(total: int) -> int:
    """Left free of a GPU on purpose, for what no rehearsal shows: memory that the allocator holds in pieces too small
    for the next tensor, and what the driver takes for kernels that are first launched in service."""
    return max(int(MARGIN_SHARE * total), GIB)


@dataclass(frozen=True)
class MemoryUse:
    """What a rank's GPU holds before there is a KV cache, in bytes.

    weights: all tensors that stay. other: what else is in use: contexts, libraries, other processes. step: what the
    largest step takes for a time. graphs: what CUDA graphs take with their inputs. margin: left free on purpose.
    """

    total: int
    weights: int
    other: int
    step: int
    graphs: int
    margin: int

    @property
    def available(self) -> int:
        """For the KV cache; below zero where the rest does not fit."""
        return self.total - self.weights - self.other - self.step - self.graphs - self.margin

    def sum(self) -> str:
        return (
            f"{_gib(self.total)} GiB of memory less {_gib(self.weights)} of weights, {_gib(self.other)} in use "
            f"besides, {_gib(self.step)} for the largest step, {_gib(self.graphs)} for graphs and "
            f"{_gib(self.margin)} kept free leaves {_gib(self.available)} GiB"
        )


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can hold. num_tokens: of KV cache, all requests together. memory: of this rank; None on a CPU,
    where nothing is measured."""

    num_tokens: int
    max_num_seqs: int
    longest: int
    cache_bytes: int
    memory: MemoryUse | None = None

    @property
    def num_blocks(self) -> int:
        """Block 0 included, which belongs to no one."""
        return self.num_tokens // BLOCK_SIZE + 1

    @property
    def free_bytes(self) -> int | None:
        """What a GPU has left when all is in use: the margin, and what no cache needs."""
        return None if self.memory is None else self.memory.available - self.cache_bytes + self.memory.margin

    def sentence(self) -> str:
        holds = (
            f"{self.num_tokens} tokens of KV cache, {self.max_num_seqs} requests at once, the longest "
            f"{self.longest} tokens"
        )
        if (use := self.memory) is None:
            return f"{holds}; KV cache {_gib(self.cache_bytes)} GiB"
        return (
            f"{holds}; of {_gib(use.total)} GiB: weights {_gib(use.weights)}, in use besides {_gib(use.other)}, "
            f"largest step {_gib(use.step)}, graphs {_gib(use.graphs)}, KV cache {_gib(self.cache_bytes)}, "
            f"free {_gib(self.free_bytes)}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"


def known_bytes(config: EngineConfig) -> int | None:
    """The memory for the KV cache where it is known without loading; None on a GPU, where it is measured."""
    if config.kv_cache_memory_gb is not None:
        return int(config.kv_cache_memory_gb * 2**30)
    return CPU_CACHE_BYTES if config.device == "cpu" else None


def given_bytes(config: EngineConfig, model_config: Any, draft_width: int = 0) -> int | None:
    """Of the blocks that kv_cache_memory_gb asks for and requests can use; None where it asks for none."""
    if config.kv_cache_memory_gb is None:
        return None
    layers = model_config.num_hidden_layers
    size = token_bytes(config, layers, model_config, draft_width) * BLOCK_SIZE
    wanted = config.max_model_len or model_config.max_position_embeddings
    return min(int(config.kv_cache_memory_gb * GIB) // size, most_useful_blocks(config, wanted)) * size


def most_useful_blocks(config: EngineConfig, longest: int) -> int:
    """More than these no requests could hold, all at their longest; block 0 included."""
    return config.max_num_seqs * -(-longest // BLOCK_SIZE) + 1


def block_bytes(config: EngineConfig, files: ModelFiles, model: Any, drafter: Any = None) -> int:
    """Of the target's cache and the draft's, which has the same blocks and numbers of the model's type."""
    draft_width = 0 if drafter is None else drafter.cache_width
    return token_bytes(config, files.model_config.num_hidden_layers, model, draft_width) * BLOCK_SIZE


def token_bytes(config: EngineConfig, num_layers: int, model: Any, draft_width: int = 0) -> int:
    """Of a token in all layers' caches and the draft's. model: the model, or its config, which says its widths too."""
    width, dtype = row_shape(config, model)
    return num_layers * width * dtype.itemsize + draft_width * getattr(torch, config.dtype).itemsize


def row_shape(config: EngineConfig, model: Any) -> tuple[int, torch.dtype]:
    """(elements, their type) of a token's row in a layer of the target's cache."""
    layout = LAYOUTS[config.kv_cache_dtype]
    width = layout.width(model.latent_width, model.cache_width - model.latent_width)
    return width, layout.dtype(getattr(torch, config.dtype))


def num_host_blocks(config: EngineConfig, files: ModelFiles, model: Any, drafter: Any = None) -> int:
    """Blocks that each rank keeps on the host. Raises ConfigError where not even one has room there, or where the host
    has not so much memory."""
    if not config.kv_offload_gb:
        return 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.kv_offload_gb * GIB > memory:
        raise ConfigError(
            f"kv_offload_gb={config.kv_offload_gb} is more than the {_gib(memory)} GiB of memory that the host has; "
            "lower it."
        )
    size = block_bytes(config, files, model, drafter)
    count = int(config.kv_offload_gb * GIB) // size
    if not count:
        raise ConfigError(f"kv_offload_gb={config.kv_offload_gb} holds no block of {size} bytes; raise it or use 0.")
    return count


def plan(
    config: EngineConfig,
    files: ModelFiles,
    block_bytes: int,
    budget: int,
    fitting: int,
    memory: MemoryUse | None = None,
) -> EngineLimits:
    """The limits where `fitting` blocks fit the budget of every rank. memory: what the budget was found from, or what
    a given one has to fit beside.

    Raises ConfigError with the sum for what cannot work."""
    wanted = config.max_model_len or files.model_config.max_position_embeddings
    if wanted > files.model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {files.model_config.max_position_embeddings} positions of "
            "the model; lower it."
        )
    num_blocks = min(fitting, most_useful_blocks(config, wanted))
    measured = memory if config.kv_cache_memory_gb is None else None
    _check_blocks(num_blocks, block_bytes, budget, measured)
    longest = min(wanted, (num_blocks - 1) * BLOCK_SIZE)
    if longest < wanted and config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len={wanted} needs {-(-wanted // BLOCK_SIZE)} KV blocks, but only {num_blocks - 1} of "
            f"{block_bytes} bytes fit; lower max_model_len to {longest} or "
            + ("raise kv_cache_memory_gb." if measured is None else f"use more ranks: {measured.sum()}.")
        )
    most_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    limits = EngineLimits((num_blocks - 1) * BLOCK_SIZE, most_seqs, longest, num_blocks * block_bytes, memory)
    _check_fits(limits)
    return limits


def _check_blocks(num_blocks: int, block_bytes: int, budget: int, measured: MemoryUse | None) -> None:
    if num_blocks >= 2:
        return
    if measured is not None:
        raise ConfigError(
            f"{measured.sum()} for the KV cache, and 2 blocks of {BLOCK_SIZE} tokens take {2 * block_bytes} bytes; use "
            "more ranks, or lower max_num_batched_tokens, max_num_seqs or graph_memory_gb."
        )
    raise ConfigError(
        f"the KV cache may use {budget} bytes, but one block of {BLOCK_SIZE} tokens takes {block_bytes} "
        "and 2 are needed; raise kv_cache_memory_gb."
    )


def _check_fits(limits: EngineLimits) -> None:
    """A cache whose size was given has to fit beside the rest."""
    memory = limits.memory
    if memory is not None and limits.cache_bytes > memory.available:
        raise ConfigError(
            f"the KV cache of {_gib(limits.cache_bytes)} GiB that kv_cache_memory_gb asks for does not fit: "
            f"{memory.sum()}; lower it or leave it out."
        )
