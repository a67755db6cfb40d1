"""What `benchmarks.full_size` measures with: the full model, or a tiny one for a dry run; whether a rank holds it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.parts import Unable
from engine.bench.share import blocks_of
from engine.cache_plan import BLOCK_SIZE, GIB
from engine.config import BUNDLED_DRAFTS, FULL_CONFIG, TINY_CHECKPOINT, EngineConfig
from engine.preflight import Subject, verdict, weigh

REPLICATED = ("allreduce", "symm_replicated", "symm_scatter", "auto")
SHARDED = ("nccl_a2a", "symm_sharded")
LENGTHS = (2.0, 2.5, 3.0)
NUM_GUESSES = 3


@dataclass(frozen=True)
class Options:
    """tp ranks on `device`. experts: routed ones of a layer, all 384 where None. gpu_memory_gb: of a rank, in GiB, what
    is there where None."""

    device: str
    dry_run: bool
    tp: int
    experts: int | None = None
    gpu_memory_gb: float | None = None

    @property
    def eps(self) -> list[int]:
        """Whole experts, two groups, slices."""
        return list(dict.fromkeys((self.tp, 2, 1)))

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Shape:
    """rows: of decode steps, each behind `context` tokens. batches: requests that are decoded with a draft,
    `spec_tokens` each. clients: at once over HTTP, with prompts and answers of so many tokens."""

    model: str
    overrides: dict[str, int]
    rows: tuple[int, ...]
    context: int
    replays: int
    prefill: int
    batches: tuple[int, ...]
    spec_tokens: int
    clients: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def draft(self) -> str:
        return str(BUNDLED_DRAFTS[FULL_CONFIG if self.model == str(FULL_CONFIG) else TINY_CHECKPOINT])


def shape_of(options: Options) -> Shape:
    """A dry run's is one that eight ranks on two cores get through in minutes; its figures say nothing."""
    if options.dry_run:
        # slices of eight ranks hold a quantisation group each; the draft looks at four of five layers
        wide_enough = {"moe_intermediate_size": 256}
        return Shape(str(TINY_CHECKPOINT), wide_enough, (1, 4, 8, 16, 64, 128), 64, 1, 128, (1,), 16, (1, 2), 32, 8)
    cut = {} if options.experts is None else {"n_routed_experts": options.experts}
    return Shape(str(FULL_CONFIG), cut, (1, 4, 8, 16, 64, 128), 4096, 30, 8192, (1, 8), 512, (1, 8), 1024, 256)


def engine_settings(options: Options, ep: int, dispatcher: str, with_draft: bool = False) -> dict[str, Any]:
    """Of EngineConfig: made-up weights that `dispatcher` can use, on all ranks."""
    shape = shape_of(options)
    return {
        "model": shape.model,
        "tp": options.tp,
        "ep": ep,
        "device": options.device,
        "dtype": options.dtype,
        "load_format": "dummy",
        "moe_comm": dispatcher,
        "hf_overrides": shape.overrides,
        "draft": shape.draft if with_draft else None,
        "num_draft_tokens": NUM_GUESSES,
        "adaptive_draft_tokens": False,  # a choice by each rank's own clock would part the ranks
        "max_step_ms": 0.0,
    }


def memory_of_rank(options: Options, settings: dict[str, Any], requests: int, longest: int) -> dict[str, Any]:
    """{"verdict": a sentence with the sum}. settings: of EngineConfig; requests of `longest` tokens each at once.

    Raises Unable with the sum where a rank does not hold the weights and such a cache."""
    config = EngineConfig(**settings | {"max_num_seqs": requests, "max_model_len": longest})
    subject, total = Subject.read(config), _bytes_of_rank(options)
    token_bytes = weigh(config, subject, total).token_bytes
    cache = (requests * blocks_of(longest) + 1) * BLOCK_SIZE * token_bytes / GIB
    found = weigh(replace(config, kv_cache_memory_gb=cache), subject, total)
    if options.device == "cpu":
        return _part_of_host(found.weight_bytes / GIB + cache, total / GIB)
    said = verdict(config, subject, found)
    if not found.fits:
        raise Unable(f"the model {said[:-1]}; --experts makes it smaller.")
    return {"verdict": said}


def _part_of_host(needed: float, part: float) -> dict[str, Any]:
    """Ranks on processors share the host's memory. In GiB."""
    said = f"a rank needs {needed:.2f} GiB of weights and KV cache, and its part of the host's memory is {part:.2f}."
    if needed > part:
        raise Unable(f"the model does not fit: {said}")
    return {"verdict": f"fits: {said}"}


def _bytes_of_rank(options: Options) -> int:
    """Of a GPU, or this rank's part of the host's memory."""
    if options.gpu_memory_gb is not None:
        return int(options.gpu_memory_gb * GIB)
    if options.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // options.tp
