"""Whether a model fits the GPUs, from its config and the names in its index alone, before any weight is read.

Weights and KV cache are counted exactly; what a step, its buffers and the CUDA context take is an allowance, since only
a rehearsal shows it. So a start refuses what the exact part rules out, and says what to expect of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import models
from draft.base import TargetShape
from engine import cache_plan
from engine.attention.backend import ATTENTION_BACKENDS
from engine.cache_plan import BLOCK_SIZE, GIB, margin_bytes
from engine.comm.choice import shards_tokens
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.kernels import table as kernel_table
from engine.layers.embedding import Embedding, LMHead
from engine.loading.weights import has_packed_experts
from engine.model_files import DraftFiles, read_model_config

STEP_BYTES = 2 * 10**9
"""Activations of the largest step, the library's own buffers and the context: an allowance, not a count."""
MOST_RANKS = 64


@dataclass(frozen=True)
class Subject:
    """What is to be loaded. is_int4: its routed experts are stored packed."""

    entry: models.ModelEntry
    model_config: Any
    is_int4: bool
    draft: DraftFiles | None = None

    @classmethod
    def read(cls, config: EngineConfig) -> Subject:
        """Of a directory with a config.json, weights or not. Raises ConfigError, CheckpointError."""
        directory, entry, model_config = read_model_config(config)
        packed = has_packed_experts(directory) if config.load_format != "dummy" else None
        is_int4 = model_config.is_quantized if packed is None else packed
        return cls(entry, model_config, is_int4, DraftFiles.read(config))


@dataclass(frozen=True)
class Preflight:
    """One rank of a world of tp ranks in ep groups, in bytes. weights: by kind. token_bytes: of the KV cache, target
    and draft. total: the GPU's memory. given: the KV cache where its size was asked for. positions: the model's most;
    wanted: tokens that the longest request must have room for, None for what there is."""

    tp: int
    ep: int
    weights: dict[str, int]
    token_bytes: int
    total: int
    graphs: int
    given: int | None
    positions: int
    wanted: int | None

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def most_cache(self) -> int:
        """More than that cannot be left for the KV cache, whatever a step and graphs take; may be below zero."""
        return self.total - margin_bytes(self.total) - self.weight_bytes

    @property
    def cache(self) -> int:
        """What is left for the KV cache, or was asked for it; may be below zero."""
        left = self.most_cache - self.graphs - STEP_BYTES
        return left if self.given is None else min(self.given, left)

    @property
    def tokens(self) -> int:
        """Tokens of context that fit, all requests together: whole blocks, one of which belongs to no one."""
        return max(self.cache // (self.token_bytes * BLOCK_SIZE) - 1, 0) * BLOCK_SIZE

    @property
    def longest(self) -> int:
        """Tokens of the longest request that fits."""
        return min(self.tokens, self.positions)

    @property
    def wanted_bytes(self) -> int:
        """The least KV cache that is of use: of the longest request where one was asked for, of one block else."""
        return (-(-(self.wanted or 1) // BLOCK_SIZE) + 1) * BLOCK_SIZE * self.token_bytes

    @property
    def fits(self) -> bool:
        return self.longest >= (self.wanted or 1) and (self.given is None or self.given <= self.cache)

    def sum(self) -> str:
        """What a rank needs, and of how much."""
        cache = self.wanted_bytes if self.given is None else self.given
        what = "asked for" if self.given is not None else f"for {self.wanted or BLOCK_SIZE} tokens"
        parts = self.weight_bytes, self.graphs, STEP_BYTES, margin_bytes(self.total), cache
        weights, graphs, step, margin, kv = map(_gib, parts)
        return (
            f"{weights} GiB of weights + {graphs} for graphs + {step} for a step + {margin} kept free + {kv} of KV "
            f"cache {what} = {_gib(sum(parts))} of {_gib(self.total)} GiB"
        )

    def row(self) -> dict[str, Any]:
        """Of a table; weights in GiB by kind."""
        return {
            "tp": self.tp,
            **{kind: round(num_bytes / GIB, 2) for kind, num_bytes in self.weights.items()},
            "weights GiB": round(self.weight_bytes / GIB, 2),
            "KV kB/token": self.token_bytes / 1e3,
            "KV tokens": self.tokens,
            "longest": self.longest,
            "fits": self.fits,
        }


def weigh(config: EngineConfig, subject: Subject, total: int) -> Preflight:
    """One rank's sum with GPUs of `total` bytes. config: resolved.

    Raises ConfigError with the sum where the model or the draft does not divide over the ranks."""
    parallel = ParallelState(device=torch.device("meta"), **config.placement())
    dtype, shape = getattr(torch, config.dtype), subject.model_config
    try:
        weights = subject.entry.share_bytes(
            shape,
            parallel,
            dtype,
            is_int4=subject.is_int4,
            reads_packed=kernel_table.reads_packed_experts(torch.device(config.device), dtype),
            shards_tokens=shards_tokens(config.moe_comm),
        )
        draft_bytes, draft_width = _draft(config, subject, parallel, dtype)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    if subject.draft is not None:
        weights = weights | {"draft": draft_bytes}
    has_graphs = config.device == "cuda" and not config.enforce_eager
    return Preflight(
        parallel.tp,
        parallel.ep,
        weights,
        cache_plan.token_bytes(config, shape.num_hidden_layers, shape, draft_width),
        total,
        int(config.graph_memory_gb * GIB) if has_graphs else 0,
        cache_plan.given_bytes(config, shape, draft_width),
        shape.max_position_embeddings,
        config.max_model_len,
    )


def _draft(config: EngineConfig, subject: Subject, parallel: ParallelState, dtype: torch.dtype) -> tuple[int, int]:
    """(bytes of the draft's own weights on this rank, numbers a token in its cache); no weight of it is read."""
    if subject.draft is None:
        return 0, 0
    shape, kernels = subject.model_config, kernel_table.KERNELS["reference"]()
    ends = (shape.vocab_size, shape.hidden_size, parallel, dtype, kernels)
    directory = subject.draft.directory
    has_weights = config.load_format != "dummy" and any(Path(directory).glob("*.safetensors"))
    drafter = subject.draft.entry.load(
        directory,
        TargetShape(shape.hidden_size, shape.vocab_size, shape.num_hidden_layers),
        parallel,
        dtype,
        kernels=kernels,
        backend=ATTENTION_BACKENDS["reference"](),
        embed=Embedding(*ends),
        lm_head=LMHead(*ends),
        dummy_seed=None if has_weights else 0,
    )
    return drafter.weight_bytes, drafter.cache_width


def worlds(config: EngineConfig, subject: Subject, total: int) -> Iterator[Preflight]:
    """The sums for every number of ranks over which the model divides, up to MOST_RANKS, whole experts where slices do
    not divide."""
    placed = config.placement()
    ratio = placed["tp"] // placed["ep"]
    for tp in range(1, MOST_RANKS + 1):
        if subject.model_config.num_attention_heads % tp:
            continue
        for ep in dict.fromkeys((tp // ratio if tp % ratio == 0 else tp, tp, 1)):
            with suppress(ConfigError):
                yield weigh(replace(config, tp=tp, ep=ep, tp_share=None, ep_share=None), subject, total)
                break


def remedies(config: EngineConfig, subject: Subject, found: Preflight) -> list[str]:
    """What would fit instead, the smallest change of each kind."""
    said = [f"tp {one.tp}" for one in worlds(config, subject, found.total) if one.tp > found.tp and one.fits][:1]
    if found.wanted is not None and found.longest >= BLOCK_SIZE and found.given is None:
        said.append(f"--max-model-len {found.longest}")
    if subject.draft is not None and weigh(config, replace(subject, draft=None), found.total).fits:
        said.append("no draft")
    if config.kv_cache_dtype == "auto" and found.cache > 0:
        narrow = replace(config, kv_cache_dtype="fp8")
        said += ["--kv-cache-dtype fp8"] * weigh(narrow, subject, found.total).fits
    if found.given is not None and replace(found, given=None).fits:
        said.append("no --kv-cache-memory-gb")
    return said


def verdict(config: EngineConfig, subject: Subject, found: Preflight) -> str:
    """One sentence: whether it fits, the sum, and what would."""
    who = f"{found.tp} rank{'s' * (found.tp > 1)} of {_gib(found.total)} GiB"
    if found.fits:
        return (
            f"fits: {who}: {_gib(found.weight_bytes)} GiB of weights each, {_gib(found.cache)} for the KV cache = "
            f"{found.tokens} tokens in all, a request up to {found.longest}."
        )
    said = remedies(config, subject, found)
    would = f"{' or '.join(said)} would fit" if said else "no change of one setting makes it fit; use larger GPUs"
    return f"does not fit: {who}: each needs {found.sum()}; {would}."


def check(config: EngineConfig, subject: Subject, total: int) -> Preflight:
    """Raises ConfigError for what cannot fit, whatever a step and graphs take. Returns the sum."""
    found = weigh(config, subject, total)
    if found.most_cache < 0:
        _refuse(
            config, subject, found, "use more ranks",
            f"a rank's weights take {_gib(found.weight_bytes)} GiB, and its GPU has {_gib(total)} GiB, of which "
            f"{_gib(margin_bytes(total))} are kept free",
        )  # fmt: skip
    if found.given is not None and found.given > found.most_cache:
        _refuse(
            config, subject, found, "lower it or leave it out",
            f"the KV cache of {_gib(found.given)} GiB that kv_cache_memory_gb asks for does not fit: a rank's weights "
            f"take {_gib(found.weight_bytes)} of {_gib(total)} GiB, and {_gib(margin_bytes(total))} are kept free",
        )  # fmt: skip
    if found.given is None and found.wanted_bytes > found.most_cache:
        _refuse(
            config, subject, found, "lower max_model_len or use more ranks",
            f"{found.wanted or BLOCK_SIZE} tokens of KV cache take {_gib(found.wanted_bytes)} GiB, and a rank's "
            f"weights of {_gib(found.weight_bytes)} leave {_gib(found.most_cache)} of {_gib(total)} GiB",
        )  # fmt: skip
    return found


def _refuse(config: EngineConfig, subject: Subject, found: Preflight, advice: str, reason: str) -> None:
    said = remedies(config, subject, found)
    raise ConfigError(f"{reason}; {advice}" + (f": {' or '.join(said)} would fit." if said else "."))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"
