"""From a checkpoint directory to a loaded model: naming variants, expert storage, and what is passed over."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.attention.backend import AttentionBackend
from engine.comm.parallel_state import ParallelState
from engine.expert_map import ExpertMap
from engine.kernels.table import Kernels
from engine.layers.dummy import fill_dummy
from engine.layers.quant import detect_storage
from engine.log import logger
from engine.weights import Checkpoint, CheckpointError
from models.kimi_k25.config import KimiConfig
from models.kimi_k25.model import VISION_PREFIXES, KimiModel
from models.kimi_k25.sizes import held_as

WRAPPER_PREFIX = "language_model."


def load_model(
    directory: str,
    config: KimiConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    *,
    backend: AttentionBackend,
    kernels: Kernels,
    shards_tokens: bool,
    expert_map: ExpertMap | None = None,
    counts_experts: bool = False,
    dummy_seed: int | None = None,
) -> KimiModel:
    """This rank's share of the model with its weights; on the meta device everything is checked and no weight is read.

    With `dummy_seed` no file is read: the weights are made up, the same for the same seed, experts in the storage that
    the config claims. Raises CheckpointError naming file and tensor, ValueError with the sum where the model does not
    divide over the ranks."""

    def build(storage: str) -> KimiModel:
        return KimiModel(
            config,
            parallel,
            dtype,
            backend=backend,
            kernels=kernels,
            expert_storage=held_as(storage, config, parallel, kernels.reads_packed_experts),
            shards_tokens=shards_tokens,
            expert_map=expert_map,
            counts_experts=counts_experts,
        )

    if kernels.needs_powers_of_two:
        _check_head_widths(config)
    if dummy_seed is None:
        return _load_checkpoint(directory, config, parallel, build)
    model = build("int4" if config.is_quantized else "float")
    fill_dummy(model, dummy_seed)
    return model


def _check_head_widths(config: KimiConfig) -> None:
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        width = getattr(config, name)
        if width & (width - 1) or width < 16:
            raise ValueError(
                f"{name}={width} is no power of two from 16 on, as bfloat16 on a GPU needs; use dtype float32."
            )


def _load_checkpoint(
    directory: str, config: KimiConfig, parallel: ParallelState, build: Callable[[str], KimiModel]
) -> KimiModel:
    checkpoint = Checkpoint(directory)
    skipped = checkpoint.skip(VISION_PREFIXES)
    is_check = parallel.device.type == "meta"
    if skipped and parallel.rank == 0 and not is_check:
        logger.info("%d tensors of %s passed over: this engine serves text only", skipped, ", ".join(VISION_PREFIXES))
    try:
        storage = detect_storage(checkpoint.tensors)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    _check_counts(config, len(checkpoint.tensors))
    model = build(storage)
    prefix = WRAPPER_PREFIX if any(name.startswith(WRAPPER_PREFIX) for name in checkpoint.tensors) else ""
    specs = model.specs(prefix)
    checkpoint.check(specs)
    if not is_check:
        checkpoint.load(specs)
    return model


def _check_counts(config: KimiConfig, num_tensors: int) -> None:
    """A config of far more layers or experts than the files hold would take hours to compare with them."""
    moe_layers = max(config.num_hidden_layers - config.first_k_dense_replace, 0)
    if max(config.num_hidden_layers, moe_layers * config.n_routed_experts) > num_tensors:
        raise CheckpointError(
            f"config.json: num_hidden_layers={config.num_hidden_layers} and n_routed_experts={config.n_routed_experts} "
            f"ask for more than the {num_tensors} tensors of the checkpoint."
        )
