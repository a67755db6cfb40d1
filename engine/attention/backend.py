"""What an attention kernel must do for MLA, and the table of those that can.

Shape letters: T tokens, H heads, C latent width, X = C + rope width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.batch import ForwardBatch


class AttentionBackend(Protocol):
    name: str

    def store(self, cache: torch.Tensor, kv_TX: torch.Tensor, batch: ForwardBatch) -> None:
        """Writes the step's rows into this layer's cache [blocks, block_size, X] at batch.slots_T."""

    def attend(
        self, q_THX: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, scale: float, w_v_HVC: torch.Tensor
    ) -> torch.Tensor:
        """Causal absorbed attention of each sequence's last query_len tokens over its cache, then each head's W_v.

        Returns [T, H, V].
        """


def _reference() -> AttentionBackend:
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention()


ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"reference": _reference}


def choose(name: str) -> str:
    return "reference" if name == "auto" else name
