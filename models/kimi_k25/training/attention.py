"""Causal attention within documents of packed rows, by three means that agree: flex, flash (variable length), SDPA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

AttentionMask = Any
Attention = Callable[[Tensor, Tensor, Tensor, AttentionMask, float], Tensor]
KINDS = ("flex", "flash", "sdpa")


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q, k [B, H, S, 192], v [B, H, S, 128], mask [B, 1, S, S] bool."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention as flex

    return flex(q, k, v, block_mask=mask, scale=scale)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Every document is one sequence of flash attention; `mask` holds their cumulative lengths (int32)."""
    batch, heads, length, width = q.shape
    v_width = v.shape[-1]
    v = F.pad(v, (0, width - v_width))
    q, k, v = (t.transpose(1, 2).reshape(batch * length, heads, width) for t in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(q, k, v, mask, mask, length, length, 0.0, True, False, scale=scale)[0]
    return out[..., :v_width].unflatten(0, (batch, length)).transpose(1, 2)


_ATTENTION = {"flex": flex_attention, "flash": flash_attention, "sdpa": sdpa_attention}


def attention_function(kind: str) -> Attention:
    return _ATTENTION[kind]


class MaskBuilder:
    """Makes the mask that one kind of attention wants from the document numbers of packed rows."""

    def __init__(self, kind: str, device: torch.device, max_documents_per_row: int = 96):
        self.kind, self.device, self.most = kind, device, max_documents_per_row
        self._create_block_mask = None

    def build(self, documents: np.ndarray) -> AttentionMask:
        """`documents` [B, S]: the number of the document at each position, different for neighbours."""
        if self.kind == "flash":
            return self._cumulative_lengths(documents)
        on_device = torch.from_numpy(documents.astype(np.int32)).to(self.device, non_blocking=True)
        if self.kind == "sdpa":
            same = on_device[:, None, :, None] == on_device[:, None, None, :]
            return (
                same & torch.ones(documents.shape[1], documents.shape[1], dtype=torch.bool, device=self.device).tril()
            )
        return self._block_mask(on_device)

    def _cumulative_lengths(self, documents: np.ndarray) -> Tensor:
        """Padded with empty sequences to a fixed count, so that shapes never change."""
        flat = documents.copy()
        starts = np.ones(flat.shape, bool)
        starts[:, 1:] = flat[:, 1:] != flat[:, :-1]
        found = np.flatnonzero(starts.ravel())
        lengths = np.full(documents.shape[0] * self.most + 1, documents.size, np.int32)
        if len(found) >= len(lengths):
            raise ValueError(f"{len(found)} documents in {documents.shape[0]} rows; raise max_documents_per_row.")
        lengths[: len(found)] = found
        return torch.from_numpy(lengths).to(self.device, non_blocking=True)

    def _block_mask(self, documents: Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        if self._create_block_mask is None:
            self._create_block_mask = torch.compile(create_block_mask)

        def within_document(batch, head, query, key):
            return (query >= key) & (documents[batch, query] == documents[batch, key])

        rows, length = documents.shape
        return self._create_block_mask(within_document, rows, None, length, length, device=str(self.device))
