"""From a checkpoint directory to a loaded model: naming variants, expert storage, and what is passed over."""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend
from engine.comm.parallel_state import ParallelState
from engine.layers.quant import detect_storage
from engine.weights import Checkpoint, CheckpointError
from models.kimi_k25.config import KimiConfig
from models.kimi_k25.model import VISION_PREFIXES, KimiModel

WRAPPER_PREFIX = "language_model."


def load_model(
    directory: str,
    config: KimiConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    *,
    backend: AttentionBackend,
    shards_tokens: bool,
) -> KimiModel:
    """This rank's share of the model with its weights. Raises CheckpointError naming file and tensor, ValueError with
    the sum where the model does not divide over the ranks."""
    checkpoint = Checkpoint(directory)
    checkpoint.skip(VISION_PREFIXES, "this engine serves text only")
    names = list(checkpoint.tensors)
    try:
        storage = detect_storage(names)
    except ValueError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    model = KimiModel(config, parallel, dtype, backend=backend, expert_storage=storage, shards_tokens=shards_tokens)
    prefix = WRAPPER_PREFIX if any(name.startswith(WRAPPER_PREFIX) for name in names) else ""
    checkpoint.load(model.specs(prefix))
    return model
