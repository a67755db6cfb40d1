"""Our Triton kernels: absorbed decode for a few query tokens a request, the expanded form for chunks."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch
from engine.comm.choice_rule import INVARIANT_ROWS
from engine.kernels.gpu.kv_rows import gather
from engine.kernels.gpu.mla_decode import MAX_QUERY_LEN, mla_decode
from engine.kernels.gpu.mla_prefill import mla_prefill


class TritonAttention:
    """context_tokens: cached keys that a chunk expands at once; bounds the memory of a prefill."""

    name = "triton"
    is_capturable = True
    max_absorbed_query_len: int | None = MAX_QUERY_LEN
    most_cut_queries = 256
    least_cut_context = 2048

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
            from_cache = cache if piece.page > 1 else cache.flatten(0, 1).unsqueeze(1)
            kv_LX = gather(from_cache, piece.pages, piece.num_keys, widths, q_THX.dtype)
            keys, carry = _expand(kv_LX, kv_b_weight, q_THX.shape), (out[piece.rows], lse[piece.rows])
            mla_prefill(q_THX[piece.rows], *keys, *piece.starts, scale, piece.max_query_len, False, carry)
        return out.to(q_THX.dtype)

    def _context(self, batch: ForwardBatch, page: int) -> list[_Piece]:
        """The cached keys before each request's chunk, a bounded number at a time.

        Those of several requests go together, but not within the invariant range: a product's bits depend on how many
        rows it has, and a row's must not depend on its company there."""
        step = max(1, self.context_tokens // page) * page
        packs = batch.token_ids_T.shape[0] > INVARIANT_ROWS
        groups: list[list[_Keys]] = []
        for n, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            for first in range(0, seq_len - query_len, step):
                keys = _Keys(n, first, min(step, seq_len - query_len - first))
                if packs and groups and sum(one.count for one in groups[-1]) + keys.count <= step:
                    groups[-1].append(keys)
                else:
                    groups.append([keys])
        ends = [0, *itertools.accumulate(batch.query_lens)]
        starts = [_starts(group, ends) for group in groups]
        sent = _send(starts, batch.block_table_NB.device)
        return [_piece(group, ends, one, batch, page) for group, one in zip(groups, sent, strict=True)]


class _Keys(NamedTuple):
    """`count` keys of request n from its key `first` on."""

    n: int
    first: int
    count: int


class _Piece(NamedTuple):
    """Cached keys of neighbouring requests. rows: their queries among the batch's; pages: where the keys lie, in pages
    of `page` tokens, one each where several requests share a piece; starts: int32 [requests + 1] each, where every
    request's queries and keys begin, and their end."""

    rows: slice
    num_keys: int
    pages: torch.Tensor
    page: int
    starts: tuple[torch.Tensor, torch.Tensor]
    max_query_len: int


def _starts(group: list[_Keys], ends: list[int]) -> list[list[int]]:
    """Of queries and keys of all requests from the group's first to its last; some may have no keys."""
    first, last = group[0].n, group[-1].n
    counts = {keys.n: keys.count for keys in group}
    key_starts = [0, *itertools.accumulate(counts.get(n, 0) for n in range(first, last + 1))]
    return [[end - ends[first] for end in ends[first : last + 2]], key_starts]


def _piece(group: list[_Keys], ends: list[int], starts: list[torch.Tensor], batch: ForwardBatch, page: int) -> _Piece:
    first, last, num_keys = group[0].n, group[-1].n, sum(keys.count for keys in group)
    rows = slice(ends[first], ends[last + 1])
    tables = [batch.block_table_NB[k.n, k.first // page : -(-(k.first + k.count) // page)] for k in group]
    most = max(batch.query_lens[first : last + 1])
    if len(group) == 1:
        return _Piece(rows, num_keys, tables[0], page, tuple(starts), most)
    within = torch.arange(page, device=batch.block_table_NB.device)
    places = [(table[:, None] * page + within).flatten()[: k.count] for table, k in zip(tables, group, strict=True)]
    return _Piece(rows, num_keys, torch.cat(places), 1, tuple(starts), most)


def _send(values: list[list[list[int]]], device: torch.device) -> list[list[torch.Tensor]]:
    """Lists of numbers as int32 in one copy from pinned memory, so that the host does not wait for the device."""
    flat = torch.tensor([number for pair in values for one in pair for number in one], dtype=torch.int32)
    if device.type != "cpu" and values:
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = iter(flat.split([len(one) for pair in values for one in pair]))
    return [[next(parts) for _ in pair] for pair in values]


def _expand(
    kv_LX: torch.Tensor, kv_b_weight: torch.Tensor, q_shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [L, H, nope], the shared roped key [L, R] and values [L, H, V] of cache rows."""
    heads, width = q_shape[1:]
    latent_LC, rope_LR = kv_LX.tensor_split([kv_b_weight.shape[1]], dim=1)
    nope = width - rope_LR.shape[1]
    kv_LHX = F.linear(latent_LC, kv_b_weight).unflatten(1, (heads, -1))
    return kv_LHX[..., :nope], rope_LR, kv_LHX[..., nope:]
