"""What a rank loads: the model's share and the draft's, checked before any weight is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from draft.base import Drafter, TargetShape
from engine import cache_plan, preflight
from engine.attention import backend as attention_backends
from engine.comm import choice, choice_rule
from engine.comm import dispatcher as dispatchers
from engine.comm.dispatcher import DispatchLimits, TokenDispatcher, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.expert_map import ExpertMap
from engine.kernels import table as kernel_table
from engine.loading import checksums
from engine.loading.prepared.weights import Preparation
from engine.loading.progress import LoadProgress
from engine.loading.weights import Checkpoint, CheckpointError, weight_files
from engine.model_files import ModelFiles


def open_checkpoint(config: EngineConfig, files: ModelFiles) -> Checkpoint | None:
    """All headers of the model's files; None where weights are made up. Raises CheckpointError."""
    return None if config.load_format == "dummy" else Checkpoint(files.directory)


def check_model(config: EngineConfig, files: ModelFiles, checkpoint: Checkpoint | None = None) -> str | None:
    """Finds what a ModelRunner would refuse on any rank, without a process group and before any weight is read.

    checkpoint: from `open_checkpoint`, or it is opened here. Returns what to expect of a GPU's memory, None where there
    is none. Raises ConfigError with the sum, CheckpointError naming file and tensor.
    """
    _check_dispatcher(config, files)
    parallel = ParallelState(device=torch.device("meta"), **config.placement())
    model = load_share(config, files, parallel, checkpoint)
    drafter = load_draft(config, files, parallel, model)
    expected = None
    subject = preflight.Subject(files.entry, files.model_config, model.expert_storage != "float", files.draft)
    if config.device == "cuda":
        expected = preflight.verdict(config, subject, preflight.check(config, subject, gpu_bytes()))
    budget = cache_plan.known_bytes(config)
    block_bytes = cache_plan.block_bytes(config, files, model, drafter)
    cache_plan.num_host_blocks(config, files, model, drafter)
    if budget is not None:
        cache_plan.plan(config, files, block_bytes, budget, budget // block_bytes)
    return expected


def verify_checksums(files: ModelFiles, place: int = 0, places: int = 1, progress: LoadProgress | None = None) -> None:
    """Compares the weight files of model and draft with their checksums; of `places` processes each takes its part.
    progress: counts the bytes of this one's.

    A draft that nothing is known of is passed over. Raises CheckpointError naming the file, ConfigError."""
    names = [file.name for file in weight_files(files.directory)]
    checksums.verify(files.directory, names[place::places], load_progress=progress)
    if files.draft is not None and checksums.expected_sums(Path(files.draft.directory)):
        names = [file.name for file in weight_files(files.draft.directory)]
        checksums.verify(Path(files.draft.directory), names[place::places], load_progress=progress)


def gpu_bytes() -> int:
    """Memory of the GPU that this process will use, all of it: torchrun says which; rank 0 that starts others has the
    first."""
    return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory


def _check_dispatcher(config: EngineConfig, files: ModelFiles) -> None:
    """Refuses one that was named and cannot run on this host."""
    if config.moe_comm == "auto":
        return
    parallel = ParallelState(device=torch.device(config.device), **config.placement())
    reason = dispatcher_class(config.moe_comm).obstacle(parallel, dispatch_limits(config, files))
    if reason is not None:
        raise ConfigError(f"moe_comm={config.moe_comm!r} {reason}; use one of the others or leave it out.")


def load_share(
    config: EngineConfig,
    files: ModelFiles,
    parallel: ParallelState,
    checkpoint: Checkpoint | None = None,
    progress: LoadProgress | None = None,
) -> Any:
    """This rank's share of the model. checkpoint: from `open_checkpoint`, or it is opened here."""
    return _call(
        files.entry.load_model,
        config,
        files,
        parallel,
        dummy_seed=config.seed if config.load_format == "dummy" else None,
        self_test=config.self_test,
        preparation=preparation(config),
        checkpoint=checkpoint,
        progress=progress,
    )


def preparation(config: EngineConfig) -> Preparation | None:
    """Where this configuration keeps prepared weights. Ranks that have written theirs wait for the others in the next
    collective, so that writing may take half of what the process group allows there."""
    directory = config.prepared_weights
    return None if directory is None else Preparation(directory, config.comm_timeout / 2)


def open_share(config: EngineConfig, files: ModelFiles, parallel: ParallelState) -> Any:
    """This rank's share as `load_share` has it before it reads weights: `model`, `checkpoint`, `specs`, and `load()`,
    which reads them."""
    return _call(files.entry.open_model, config, files, parallel)


def _call(
    function: Callable[..., Any], config: EngineConfig, files: ModelFiles, parallel: ParallelState, **settings: Any
) -> Any:
    """A model's `load_model` or `open_model` with what this configuration chooses."""
    dtype = getattr(torch, config.dtype)
    device = torch.device(config.device)
    try:
        backend_name = attention_backends.choose(
            config.attention_backend, device, dtype, config.kv_cache_dtype == "fp8"
        )
        return function(
            str(files.directory),
            files.model_config,
            parallel,
            dtype,
            backend=attention_backends.ATTENTION_BACKENDS[backend_name](),
            kernels=kernel_table.KERNELS[kernel_table.choose(device, dtype)](),
            shards_tokens=choice.shards_tokens(config.moe_comm),
            expert_map=ExpertMap.of(config, files.model_config.n_routed_experts, files.model_config.moe_layers),
            counts_experts=config.expert_load,
            **settings,
        )
    except (CheckpointError, ConfigError):
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def load_draft(
    config: EngineConfig,
    files: ModelFiles,
    parallel: ParallelState,
    model: Any,
    progress: LoadProgress | None = None,
) -> Drafter | None:
    """This rank's share of the draft, None where none was asked for. It shares the target's embedding, and its head
    where it has none of its own."""
    if files.draft is None:
        return None
    shape = files.model_config
    try:
        return files.draft.entry.load(
            files.draft.directory,
            TargetShape(shape.hidden_size, shape.vocab_size, shape.num_hidden_layers),
            parallel,
            getattr(torch, config.dtype),
            kernels=model.kernels,
            backend=model.backend,
            embed=model.embed_tokens,
            lm_head=model.lm_head,
            dummy_seed=config.seed if config.load_format == "dummy" else None,
            progress=progress,
        )
    except (CheckpointError, ConfigError):
        raise
    except ValueError as error:
        raise ConfigError(f"draft {files.draft.directory}: {error}") from error


def draft_dispatcher(parallel: ParallelState, limits: DispatchLimits) -> TokenDispatcher:
    """One that leaves all rows whole on every rank, and whose sums are one shot where the links allow it."""
    if parallel.is_alone:
        return dispatchers.build("reference", parallel, limits)
    one_shot = dispatcher_class("symm_replicated").obstacle(parallel, limits) is None
    on_gpu = parallel.device.type == "cuda"
    return dispatchers.build("symm_replicated" if on_gpu and one_shot else choice_rule.BASELINE, parallel, limits)


def dispatch_limits(config: EngineConfig, files: ModelFiles) -> DispatchLimits:
    model = files.model_config
    return DispatchLimits(
        num_experts=model.n_routed_experts,
        width=model.hidden_size,
        top_k=model.num_experts_per_tok,
        max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        dtype=getattr(torch, config.dtype),
    )
