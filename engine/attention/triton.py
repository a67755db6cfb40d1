"""Our Triton kernels: absorbed decode for a few query tokens a request, the expanded form for chunks."""

from __future__ import annotations

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
        if all(seq_len == query_len for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True)):
            return out
        out = out.float()
        start = 0
        for n, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            rows = slice(start, start + query_len)
            self._context(
                q_THX[rows], cache, batch.block_table_NB[n], seq_len - query_len, scale, kv_b_weight,
                (out[rows], lse[rows]),
            )  # fmt: skip
            start += query_len
        return out.to(q_THX.dtype)

    def _context(
        self,
        q_THX: torch.Tensor,
        cache: torch.Tensor,
        block_table_B: torch.Tensor,
        length: int,
        scale: float,
        kv_b_weight: torch.Tensor,
        carry: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Adds one request's cached keys before its chunk to `carry`, a bounded number at a time."""
        page, nope = cache.shape[1], kv_b_weight.shape[0] // q_THX.shape[1] - carry[0].shape[2]
        widths = (kv_b_weight.shape[1], q_THX.shape[2] - nope)
        step = max(1, self.context_tokens // page)
        for first in range(0, -(-length // page), step):
            num_keys = min(step * page, length - first * page)
            pages = block_table_B[first : first + -(-num_keys // page)]
            kv_LX = gather(cache, pages, num_keys, widths, q_THX.dtype)
            keys = _expand(kv_LX, kv_b_weight, q_THX.shape)
            starts = torch.tensor([[0, q_THX.shape[0]], [0, num_keys]], dtype=torch.int32, device=cache.device)
            mla_prefill(q_THX, *keys, *starts, scale, q_THX.shape[0], False, carry)


def _expand(
    kv_LX: torch.Tensor, kv_b_weight: torch.Tensor, q_shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [L, H, nope], the shared roped key [L, R] and values [L, H, V] of cache rows."""
    heads, width = q_shape[1:]
    latent_LC, rope_LR = kv_LX.tensor_split([kv_b_weight.shape[1]], dim=1)
    nope = width - rope_LR.shape[1]
    kv_LHX = F.linear(latent_LC, kv_b_weight).unflatten(1, (heads, -1))
    return kv_LHX[..., :nope], rope_LR, kv_LHX[..., nope:]
