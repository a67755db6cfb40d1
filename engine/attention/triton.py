"""Our Triton kernels: absorbed decode for a few query tokens a request, the expanded form for chunks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from engine.kernels.gpu.kv_rows import gather
from engine.kernels.gpu.mla_decode import MAX_QUERY_LEN, mla_decode
from engine.kernels.gpu.mla_prefill import mla_prefill


class TritonAttention:
    """context_tokens: cached keys that a chunk expands at once; bounds the memory of a prefill."""

    name = "triton"
    is_capturable = True
    max_absorbed_query_len: int | None = MAX_QUERY_LEN

    def __init__(self, context_tokens: int = 16384):
        self.context_tokens = context_tokens

    def attend(
        self, q_THX: torch.Tensor, cache: torch.Tensor, batch: ForwardBatch, scale: float, w_v_HVC: torch.Tensor
    ) -> torch.Tensor:
        return mla_decode(
            q_THX,
            cache,
            batch.block_table_NB,
            batch.query_starts_N1,
            batch.seq_lens_N,
            scale,
            w_v_HVC,
            batch.max_query_len,
        )

    def prefill(
        self,
        q_THX: torch.Tensor,
        kv_TX: torch.Tensor,
        cache: torch.Tensor,
        batch: ForwardBatch,
        scale: float,
        kv_b_weight: torch.Tensor,
    ) -> torch.Tensor:
        """Raises nothing of its own; needs the batch's host lists, so it is not for graphs."""
        starts = batch.query_starts_N1
        out, lse = mla_prefill(
            q_THX, *_expand(kv_TX, kv_b_weight, q_THX.shape), starts, starts, scale, batch.max_query_len, True
        )
        pieces = batch.once(("context", self.context_tokens), lambda: self._context(batch, cache.shape[1]))
        if not pieces:
            return out
        out = out.float()
        widths = (kv_b_weight.shape[1], kv_TX.shape[1] - kv_b_weight.shape[1])
        for piece in pieces:
            kv_LX = gather(cache, piece.pages, piece.num_keys, widths, q_THX.dtype)
            queries, keys = q_THX[piece.rows], _expand(kv_LX, kv_b_weight, q_THX.shape)
            carry = out[piece.rows], lse[piece.rows]
            mla_prefill(queries, *keys, *piece.starts, scale, queries.shape[0], False, carry)
        return out.to(q_THX.dtype)

    def _context(self, batch: ForwardBatch, page: int) -> list[_Piece]:
        """Each request's cached keys before its chunk, a bounded number at a time."""
        found, row = [], 0
        step = max(1, self.context_tokens // page) * page
        for n, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            length, rows = seq_len - query_len, slice(row, row + query_len)
            for first in range(0, length, step):
                num_keys = min(step, length - first)
                pages = batch.block_table_NB[n, first // page : -(-(first + num_keys) // page)]
                found.append((rows, num_keys, pages))
            row += query_len
        if not found:
            return []
        starts = [[[0, rows.stop - rows.start], [0, num_keys]] for rows, num_keys, _ in found]
        sent = _send(starts, batch.block_table_NB.device)
        return [_Piece(*one, tuple(pair)) for one, pair in zip(found, sent, strict=True)]


class _Piece(NamedTuple):
    """Some of a request's cached keys. rows: its queries among the batch's; pages: where the keys lie; starts: int32
    [2] each, where queries and keys of this one request begin, and their end."""

    rows: slice
    num_keys: int
    pages: torch.Tensor
    starts: tuple[torch.Tensor, torch.Tensor]


def _send(values: list, device: torch.device) -> torch.Tensor:
    """int32, from pinned memory, so that the host does not wait for the device."""
    tensor = torch.tensor(values, dtype=torch.int32)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _expand(
    kv_LX: torch.Tensor, kv_b_weight: torch.Tensor, q_shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [L, H, nope], the shared roped key [L, R] and values [L, H, V] of cache rows."""
    heads, width = q_shape[1:]
    latent_LC, rope_LR = kv_LX.tensor_split([kv_b_weight.shape[1]], dim=1)
    nope = width - rope_LR.shape[1]
    kv_LHX = F.linear(latent_LC, kv_b_weight).unflatten(1, (heads, -1))
    return kv_LHX[..., :nope], rope_LR, kv_LHX[..., nope:]
