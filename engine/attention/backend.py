"""What an attention kernel must do for MLA, and the table of those that can.

Shape letters: T tokens, H heads, C latent width, X = C + rope width, V value width of a head. A cache is
[blocks, block_size, W] with rows of either layout in engine.kernels.kv_layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.batch import ForwardBatch
from engine.kernels.kv_layout import LEAST_CAPABILITY


class AttentionBackend(Protocol):
    """is_capturable: `attend` may be captured in a CUDA graph. max_absorbed_query_len: `attend` takes so many query
    tokens of a request; None: any number, and all go there. Requests with more go to `prefill`, or are cut into several
    for `attend` where a context is cheaper to read than to expand: up to most_cut_queries tokens behind one of at least
    least_cut_context."""

    name: str
    is_capturable: bool
    max_absorbed_query_len: int | None
    most_cut_queries: int
    least_cut_context: int

    def attend(
        self, q_THX: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, scale: float, w_v_HVC: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of each sequence's last query_len tokens over its cache, queries absorbed, then W_UV.

        Returns [T, H, V]. W_v may be a view of kv_b."""

    def prefill(
        self,
        q_THX: torch.Tensor,
        kv_TX: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        kv_b_weight: torch.Tensor,
    ) -> torch.Tensor:
        """The same for queries [T, H, nope + rope] that are not absorbed, with the chunk's own rows at hand.

        kv_b_weight: [H * (nope + V), C]. The cache holds what comes before the chunk. Returns [T, H, V]."""


def _reference() -> AttentionBackend:
    from engine.attention.reference import ReferenceAttention

    return ReferenceAttention()


def _triton() -> AttentionBackend:
    from engine.attention.triton import TritonAttention

    return TritonAttention()


ATTENTION_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"reference": _reference, "triton": _triton}


def choose(name: str, device: torch.device, dtype: torch.dtype, in_bytes: bool = False) -> str:
    """The backend's name for "auto". in_bytes: the cache has rows of bytes. Raises ValueError where the named one, or
    such a cache, cannot run."""
    fast = device.type == "cuda" and dtype == torch.bfloat16
    if name == "triton" and not fast:
        raise ValueError("attention_backend=triton needs bfloat16 on CUDA; use attention_backend=auto")
    if fast and in_bytes and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise ValueError(
            "kv_cache_dtype='fp8' needs a GPU of compute capability {}.{} or newer, and this one has {}.{}; use "
            "kv_cache_dtype='auto'".format(*LEAST_CAPABILITY, *capability)
        )
    if name == "auto":
        return "triton" if fast else "reference"
    return name
