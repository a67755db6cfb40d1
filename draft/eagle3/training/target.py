"""What training wants of a target model. Which one it is, the command line says: a draft knows no model by itself."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Target(Protocol):
    """embedding, head: weights [V, D]. final_norm: weight [D]. special_ids: tokens that a draft must be able to guess.
    eps: of its RMSNorms. dtype: that of its hidden states."""

    device: torch.device
    dtype: torch.dtype
    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    stop_ids: list[int]
    special_ids: list[int]
    width: int
    vocab_size: int
    num_layers: int
    max_positions: int
    eps: float

    def features(self, ids: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """ids int64 [B, S], padded on the right -> (the residual streams entering `layers` side by side
        [B, S, len(layers) * D], final normed hidden states [B, S, D])."""

    def generate(
        self, prompts: list[np.ndarray], max_new: int, temperatures: Sequence[float], seed: int
    ) -> list[np.ndarray]:
        """Continuations with the stop token that ended them; temperature 0 is greedy."""


def load_target(name: str, checkpoint: Path, device: torch.device) -> Target:
    """Calls `name`, a "module:function", with the checkpoint's folder and the device. Raises ValueError for a name of
    another form, ImportError or AttributeError where there is no such thing."""
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"--target {name} names no function; write it as module:function.")
    return getattr(import_module(module), function)(checkpoint, device)
