"""Plain PyTorch twins of every kernel: the oracle of the tests and the path that runs without a GPU.

Shape letters: T tokens, D model width, H heads, G key heads, d head width, C latent width, R rope width, E experts,
K experts a token, I expert width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import kv_layout


def embed(token_ids_T: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Rows token - first of `weight`; zeros for tokens whose row is not there, so that ranks' shares add up."""
    local_T = token_ids_T - first
    elsewhere_T = (local_T < 0) | (local_T >= weight.shape[0])
    return F.embedding(local_T.masked_fill(elsewhere_T, 0), weight).masked_fill(elsewhere_T.unsqueeze(1), 0)


def rope_angles(positions_T: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> torch.Tensor:
    """complex64 [T, R / 2]: magnitude * exp(i * position * frequency); float32 holds every position exactly."""
    angles = positions_T.float().unsqueeze(1) * frequencies
    return torch.polar(torch.full_like(angles, magnitude), angles)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * rsqrt(mean(x^2) + eps) in float32, cast back, then times the weight, as the checkpoint's own code does."""
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def add_norm(
    partial: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + partial in the residual's type, and its RMSNorm -> (x [T, D], residual [T, D]).

    partial: [T, D], or parts [P, T, D] that are added up in order first.
    """
    if partial.dim() == 3:
        partial = add_parts(partial)
    residual_TD = residual_TD + partial.to(residual_TD.dtype)
    return rms_norm(residual_TD, weight_D, eps), residual_TD


def add_parts(parts_PTD: torch.Tensor) -> torch.Tensor:
    """Float32 sum over the first dimension in index order, the same bits on every rank."""
    total_TD = parts_PTD[0].float()
    for part_TD in parts_PTD[1:]:
        total_TD = total_TD + part_TD.float()
    return total_TD


def rotate_pairs(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on interleaved pairs (2i, 2i+1), left in place.

    x: [T, ..., R]; cis: complex64 [T, R/2]. Returns x's shape and dtype.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    while cis.dim() < pairs.dim():
        cis = cis.unsqueeze(1)
    return torch.view_as_real(pairs * cis).flatten(-2).to(x.dtype)


def rotate_halves(x_THd: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
    """Rotary embedding on pairs (i, i + d / 2) of each head, left in place; cis: complex64 [T, d / 2]."""
    first, second = x_THd.float().chunk(2, dim=-1)
    turned = torch.complex(first, second) * cis.unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1).to(x_THd.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for rows [gate | up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, normalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid router with a bias that selects but does not weigh (DeepSeek-V3 report, section 2.1.2).

    Returns expert ids int64 [T, K] and weights float32 [T, K].
    """
    scores_TE = logits_TE.float().sigmoid()
    ids_TK = (scores_TE + bias_E).topk(top_k, dim=-1, sorted=False).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK * scale


def count_experts(ids_TK: torch.Tensor, num_tokens_1: torch.Tensor, counts_E: torch.Tensor) -> None:
    """Adds to the int64 counts, in place, how many of the first num_tokens_1 rows chose each expert."""
    counted_T = torch.arange(ids_TK.shape[0], device=ids_TK.device) < num_tokens_1
    counts_E.index_add_(0, ids_TK.flatten(), counted_T.unsqueeze(1).expand_as(ids_TK).flatten().long())


def local_ids(ids_TK: torch.Tensor, local_experts: range, num_tokens_1: torch.Tensor) -> torch.Tensor:
    """Ids counted from this rank's first expert; -1 for experts elsewhere and in rows from num_tokens_1 on."""
    elsewhere_TK = (ids_TK < local_experts.start) | (ids_TK >= local_experts.stop)
    padding_T = torch.arange(ids_TK.shape[0], device=ids_TK.device) >= num_tokens_1
    return (ids_TK - local_experts.start).masked_fill(elsewhere_TK | padding_T.unsqueeze(1), -1)


def absorb(q_THX: torch.Tensor, w_k_HNC: torch.Tensor) -> torch.Tensor:
    """Queries [T, H, N + R] with the nope part taken to the latent space, [T, H, C + R]."""
    nope = w_k_HNC.shape[1]
    latent_HTC = torch.bmm(q_THX[..., :nope].transpose(0, 1), w_k_HNC)
    return torch.cat([latent_HTC.transpose(0, 1), q_THX[..., nope:]], dim=-1)


def experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    gate_up_EID: torch.Tensor,
    down_EDI: torch.Tensor,
    shared_act_TI: torch.Tensor | None = None,
    shared_down_DI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted sum of each row's experts; id -1 means that the expert is not here.

    With the shared expert's activation [T, S] and down matrix [D, S] its product is added last.

    gate_up_EID: [E, 2I, D], gate rows first; down_EDI: [E, D, I]. Each expert's output is weighted and summed in
    float32 in order of expert id, the same on every device and in every run. Returns float32 [T, D].
    """
    ids_TK, slots_TK = ids_TK.long().sort(dim=-1)
    weights_TK = weights_TK.gather(1, slots_TK)
    num_tokens, top_k = ids_TK.shape
    num_experts = gate_up_EID.shape[0]
    flat = ids_TK.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
    order = order[counts[0] :]
    rows = order // top_k
    x = x_TD[rows]
    y = torch.empty(rows.shape[0], x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    start = 0
    for expert, count in enumerate(counts[1:]):
        if count:
            stop = start + count
            hidden = silu_mul(torch.mm(x[start:stop], gate_up_EID[expert].t()))
            torch.mm(hidden, down_EDI[expert].t(), out=y[start:stop])
            start = stop
    # Not index_add_, which on a GPU adds in whatever order its threads arrive.
    place_TK = torch.empty_like(flat).index_copy_(0, order, torch.arange(order.shape[0], device=order.device))
    place_TK = place_TK.view_as(ids_TK).masked_fill(ids_TK < 0, 0)
    out_TD = torch.zeros(num_tokens, x_TD.shape[1], dtype=torch.float32, device=x_TD.device)
    if order.shape[0]:
        for ids_T, place_T, weight_T in zip(ids_TK.t(), place_TK.t(), weights_TK.t(), strict=True):
            out_TD += (y[place_T].float() * weight_T.unsqueeze(1)).masked_fill(ids_T.unsqueeze(1) < 0, 0)
    if shared_act_TI is not None:
        out_TD += F.linear(shared_act_TI, shared_down_DI)
    return out_TD


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, group_size: int = 32) -> torch.Tensor:
    """Float32 weight [out, in] of a pack-quantized one.

    packed: int32 [out, in/8], eight columns a word, lowest nibble = lowest column, stored value = q + 8.
    scale: [out, in/group_size]. w[o, k] = (nibble - 8) * scale[o, k // group_size].
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    q = ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8
    return (q.unflatten(-1, (-1, group_size)) * scale.float().unsqueeze(-1)).flatten(-2)


def store_latent(cache: torch.Tensor, rows_TX: torch.Tensor, slots_T: torch.Tensor, latent_width: int) -> torch.Tensor:
    """Writes each token's row [latent | roped key] of width C + R into its slot; cache: [blocks, block_size, W], W as
    its layout has it. Returns the rows as later steps will read them."""
    layout = kv_layout.of(cache)
    rows_TW = layout.pack(rows_TX, latent_width)
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots_T, rows_TW)
    return layout.unpack(rows_TW, latent_width, rows_TX.shape[1] - latent_width, rows_TX.dtype)


def store_heads(cache: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Writes each token's keys, then its values, into its slot; cache: [blocks, block_size, 2 x G x d]."""
    rows_TX = torch.cat((k_TGd.flatten(1), v_TGd.flatten(1)), dim=1)
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots_T, rows_TX)


def attend_heads(
    q_NHd: torch.Tensor, cache: torch.Tensor, table_NB: torch.Tensor, seq_lens_N: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query a sequence over its keys and values in the cache, one sequence at a time; softmax in float32.

    Query head h reads key head h // (H / G). Returns [N, H, d], zeros where the length is 0.
    """
    width, block_size = q_NHd.shape[2], cache.shape[1]
    out_NHd = torch.zeros_like(q_NHd)
    for n, seq_len in enumerate(seq_lens_N.tolist()):
        if not seq_len:
            continue
        rows_LX = cache[table_NB[n, : -(-seq_len // block_size)]].flatten(0, 1)[:seq_len]
        k_LGd, v_LGd = (half.unflatten(1, (-1, width)) for half in rows_LX.chunk(2, dim=1))
        q_Ghd = q_NHd[n].unflatten(0, (k_LGd.shape[1], -1))
        scores_GhL = torch.einsum("ghd,lgd->ghl", q_Ghd, k_LGd).float() * scale
        probs_GhL = scores_GhL.softmax(-1).to(q_NHd.dtype)
        out_NHd[n] = torch.einsum("ghl,lgd->ghd", probs_GhL, v_LGd).flatten(0, 1)
    return out_NHd


def mla_paged(
    q_THX: torch.Tensor,
    cache: torch.Tensor,
    block_table_NB: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    scale: float,
    latent_width: int,
) -> torch.Tensor:
    """Absorbed MLA over the paged latent cache of any layout, one sequence at a time.

    q_THX: [T, H, C + R], already multiplied by W_k and roped. Query i of a sequence sees the keys up to its own
    position. Softmax in float32. Returns [T, H, C].
    """
    out_THC = torch.empty(*q_THX.shape[:2], latent_width, dtype=q_THX.dtype, device=q_THX.device)
    rope_width = q_THX.shape[2] - latent_width
    start = 0
    for n, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        keys_LX = cached_rows(cache, block_table_NB[n], seq_len, (latent_width, rope_width), q_THX.dtype)
        q_HQX = q_THX[start : start + query_len].transpose(0, 1)
        scores_HQL = torch.matmul(q_HQX, keys_LX.t()).float() * scale
        if query_len > 1:
            first_hidden = torch.arange(seq_len - query_len + 1, seq_len + 1, device=q_THX.device)
            hidden_QL = torch.arange(seq_len, device=q_THX.device) >= first_hidden.unsqueeze(1)
            scores_HQL.masked_fill_(hidden_QL, float("-inf"))
        probs_HQL = scores_HQL.softmax(-1).to(q_THX.dtype)
        out_THC[start : start + query_len] = torch.matmul(probs_HQL, keys_LX[:, :latent_width]).transpose(0, 1)
        start += query_len
    return out_THC


def cached_rows(
    cache: torch.Tensor, block_table_B: torch.Tensor, length: int, widths: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The first `length` rows of one sequence, [L, C + R] in `dtype`. widths: (C, R)."""
    rows_LW = cache[block_table_B[: -(-length // cache.shape[1])]].flatten(0, 1)[:length]
    return kv_layout.of(cache).unpack(rows_LW, *widths, dtype)


def mla_naive(q_THX: torch.Tensor, keys_LHX: torch.Tensor, values_LHV: torch.Tensor, scale: float) -> torch.Tensor:
    """Expanded causal attention of one sequence whose last T of L positions are the queries: the oracle of MLA.

    q_THX: [T, H, nope + rope]; keys_LHX alike over L positions; values_LHV: [L, H, V]. Returns [T, H, V].
    """
    query_len, seq_len = q_THX.shape[0], keys_LHX.shape[0]
    scores_HTL = torch.einsum("thx,lhx->htl", q_THX, keys_LHX).float() * scale
    visible_TL = torch.ones(query_len, seq_len, dtype=torch.bool, device=q_THX.device).tril(seq_len - query_len)
    probs_HTL = scores_HTL.masked_fill(~visible_TL, float("-inf")).softmax(-1).to(q_THX.dtype)
    return torch.einsum("htl,lhv->thv", probs_HTL, values_LHV)


def mla_prefill(
    q_THX: torch.Tensor,
    kv_TX: torch.Tensor,
    cache: torch.Tensor,
    block_table_NB: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    scale: float,
    kv_b_weight: torch.Tensor,
) -> torch.Tensor:
    """Expanded attention of chunks over their cached context and themselves, one sequence at a time.

    q_THX: [T, H, nope + R]; kv_TX: the chunks' own rows [T, C + R]; kv_b_weight: [H * (nope + V), C], nope rows of a
    head first. Returns [T, H, V].
    """
    heads, latent_width = q_THX.shape[1], kv_b_weight.shape[1]
    rope_width = kv_TX.shape[1] - latent_width
    nope = q_THX.shape[2] - rope_width
    outs, start = [], 0
    for n, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        context = seq_len - query_len
        cached_LX = cached_rows(cache, block_table_NB[n], context, (latent_width, rope_width), kv_TX.dtype)
        rows_LX = torch.cat([cached_LX, kv_TX[start : start + query_len]])
        latent_LC, rope_LR = rows_LX.tensor_split([latent_width], dim=1)
        kv_LHX = F.linear(latent_LC, kv_b_weight).unflatten(1, (heads, -1))
        keys_LHX = torch.cat([kv_LHX[..., :nope], rope_LR.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
        outs.append(mla_naive(q_THX[start : start + query_len], keys_LHX, kv_LHX[..., nope:], scale))
        start += query_len
    return torch.cat(outs)


def stream_read(x: torch.Tensor, num_programs: int, block: int) -> torch.Tensor:
    """Float32 [num_programs]: block i of `x` is added to sum i modulo num_programs."""
    return x.view(-1, num_programs, block).sum((0, 2))
