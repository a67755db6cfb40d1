"""Absorbed multi-head latent attention over a paged cache for a few query tokens a request (DeepSeek-V2, section 2.1).

`_attend` reads each tile of keys once for all heads and query tokens of its request and leaves one partial sum a split;
the kernels of mla_merge add the splits by log-sum-exp and multiply by W_UV. Tokens lie on the M side of both products
(S^T = K q^T, O^T = V^T P^T), so that eight heads fill one instruction and the sums stay small.

A split is a range of keys which follows from the length that a row sees, never from the batch: the same row gives the
same bits alone, in any batch, and as one of several query tokens.

Shape letters: T tokens, N requests, B pages a request may hold, H heads, C latent width, R rope width, X = C + R,
V value width of a head, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import kv_rows, mla_decode_hopper
from engine.kernels.gpu.kv_rows import from_e4m3, rope_at, scale_at
from engine.kernels.gpu.mla_decode_hopper import SPECIALIZATION
from engine.kernels.gpu.mla_merge import combine, merge_cases, split_size, up_project
from engine.kernels.gpu.pdl import launch_options, wait
from engine.kernels.kv_layout import LEAST_CAPABILITY

MAX_QUERY_LEN = 16


@dataclass(frozen=True)
class DecodeConfig:
    """What may be tuned. `min_split` and `max_splits` change results in the last bits, the others hardly.

    hopper: the Gluon kernel of mla_decode_hopper where the shape fits it, which takes no other number of tokens, stages
    and warps than its own; tokens: keys a tile, a divisor of the page; stages: tiles in flight; max_rows: heads x query
    tokens that one program takes at most; programs: resident programs an SM; min_split: fewest keys a split, a multiple
    of 64; max_splits: a power of two; columns: latent columns of a program that merges; values: value columns of a
    program of the up-projection.
    """

    hopper: bool = False
    tokens: int = 32
    stages: int = 2
    warps: int = 4
    max_rows: int = 32
    programs: int = 1
    min_split: int = 64
    max_splits: int = 64
    columns: int = 64
    values: int = 16


GENERAL = DecodeConfig()
CONFIGS = {(9, 0): DecodeConfig(hopper=True)}


def config_for(capability: tuple[int, int]) -> DecodeConfig:
    """The tuned entry, or the general one, which needs no more than 99 KB of shared memory."""
    return CONFIGS.get(capability, GENERAL)


@triton.jit
def _num_units(query_len, seq_len, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Splits of the request's last row, and, where its first row has smaller ones, MAX_SPLITS of those as well."""
    size = split_size(seq_len, MIN_SPLIT, MAX_SPLITS)
    first_size = split_size(seq_len - query_len + 1, MIN_SPLIT, MAX_SPLITS)
    units = (seq_len + size - 1) // size + tl.where(first_size < size, MAX_SPLITS, 0)
    return tl.where((seq_len > 0) & (query_len > 0), units, 0)


@triton.jit
def _tile(
    latent_KC, rope_KR, row_scale_K, q_RC, q_RR, acc_CR, top, denominator, visible, scale_log2, SCALED: tl.constexpr
):
    """One tile of keys: online softmax in powers of two. SCALED: keys and values are row_scale times the tile's."""
    scores = tl.dot(latent_KC, tl.trans(q_RC))
    scores = tl.dot(rope_KR, tl.trans(q_RR), scores)
    if SCALED:
        scores = scores * row_scale_K[:, None]
    scores = tl.where(visible, scores * scale_log2, -1e30)
    new_top = tl.maximum(top, tl.max(scores, 0))
    probs = tl.exp2(scores - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    denominator = denominator * shrink + tl.sum(probs, 0)
    if SCALED:
        probs = probs * row_scale_K[:, None]
    acc_CR = tl.dot(tl.trans(latent_KC), probs.to(latent_KC.dtype), acc_CR * shrink[None, :])
    return acc_CR, new_top, denominator


@triton.jit(**SPECIALIZATION)
def _attend(
    q_ptr,
    cache_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    partial_ptr,
    lse_ptr,
    table_stride,
    num_requests,
    scale_log2,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, r) takes units p, p + programs, ... of all requests' splits and rows r * ROWS... of their queries."""
    wait(PDL)
    requests = tl.arange(0, REQUESTS)
    known = requests < num_requests
    lens = tl.load(lens_ptr + requests, mask=known, other=0)
    first_rows = tl.load(starts_ptr + requests, mask=known, other=0)
    query_lens = tl.load(starts_ptr + requests + 1, mask=known, other=0) - first_rows
    units = _num_units(query_lens, lens, MIN_SPLIT, MAX_SPLITS)
    ends = tl.cumsum(units, 0)
    total = tl.sum(units, 0)

    tokens = tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, C)
    rope_columns = C + tl.arange(0, R)
    for unit in range(tl.program_id(0), total, tl.num_programs(0)):
        n = tl.sum((ends <= unit).to(tl.int32), 0)
        split = unit - tl.sum(tl.where(requests == n, ends - units, 0), 0)
        seq_len = tl.load(lens_ptr + n)
        first_row = tl.load(starts_ptr + n)
        query_len = tl.load(starts_ptr + n + 1) - first_row
        size = split_size(seq_len, MIN_SPLIT, MAX_SPLITS)
        stop = seq_len
        num_splits = (seq_len + size - 1) // size
        if split >= num_splits:  # a unit of the rows whose shorter view has smaller splits
            split -= num_splits
            size = split_size(seq_len - query_len + 1, MIN_SPLIT, MAX_SPLITS)
            stop = size * MAX_SPLITS
        row_lens = tl.where(rows < query_len * H, seq_len - query_len + 1 + rows // H, 0)
        row_size = split_size(row_lens, MIN_SPLIT, MAX_SPLITS)
        wanted = (row_lens > split * size) & (row_size == size)
        if tl.max(wanted.to(tl.int32), 0) > 0:
            q_rows = q_ptr + (first_row.to(tl.int64) * H + rows) * (C + R)
            real = rows < query_len * H
            q_RC = tl.load(q_rows[:, None] + columns[None, :], mask=real[:, None], other=0.0)
            q_RR = tl.load(q_rows[:, None] + rope_columns[None, :], mask=real[:, None], other=0.0)
            table_row = table_ptr + n.to(tl.int64) * table_stride
            top = tl.full([ROWS], -1e30, tl.float32)
            denominator = tl.zeros([ROWS], tl.float32)
            acc_CR = tl.zeros([C, ROWS], tl.float32)
            stop = tl.minimum(stop, (split + 1) * size)
            for t in tl.range(split * size, stop, TOKENS, num_stages=STAGES):
                page = tl.load(table_row + t // PAGE).to(tl.int64)
                width: tl.constexpr = ROW if ROW else C + R
                key_rows = cache_ptr + page * (PAGE * width) + (t % PAGE + tokens) * width
                written = (t + tokens < seq_len)[:, None]
                if ROW:
                    bits_KC = tl.load(key_rows[:, None] + columns[None, :], mask=written, other=0)
                    latent_KC = from_e4m3(bits_KC, q_RC.dtype)
                    at_KR = rope_at(key_rows, C)[:, None] + tl.arange(0, R)[None, :]
                    rope_KR = tl.load(at_KR, mask=written, other=0.0).to(q_RC.dtype)
                    row_scale_K = tl.load(scale_at(key_rows, C, R), mask=t + tokens < seq_len, other=0.0)
                else:
                    latent_KC = tl.load(key_rows[:, None] + columns[None, :], mask=written, other=0.0)
                    rope_KR = tl.load(key_rows[:, None] + rope_columns[None, :], mask=written, other=0.0)
                    row_scale_K = 1.0
                visible = (t + tokens)[:, None] < row_lens[None, :]
                acc_CR, top, denominator = _tile(
                    latent_KC, rope_KR, row_scale_K, q_RC, q_RR, acc_CR, top, denominator, visible, scale_log2, ROW > 0
                )
            out_RC = tl.trans(acc_CR / denominator[None, :])
            places = (first_row.to(tl.int64) * H + rows) * MAX_SPLITS + split
            out_rows = partial_ptr + places * C
            tl.store(
                out_rows[:, None] + columns[None, :], out_RC.to(partial_ptr.dtype.element_ty), mask=wanted[:, None]
            )
            tl.store(lse_ptr + places, top + tl.log2(denominator), mask=wanted)


@lru_cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@lru_cache
def _tuned(device: torch.device) -> DecodeConfig:
    return config_for(torch.cuda.get_device_capability(device)) if device.type == "cuda" else GENERAL


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


def mla_decode(
    q_THX: torch.Tensor,
    cache: torch.Tensor,
    block_table_NB: torch.Tensor,
    query_starts_N1: torch.Tensor,
    seq_lens_N: torch.Tensor,
    scale: float,
    w_v_HVC: torch.Tensor,
    max_query_len: int,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attention of each request's last query tokens over its cached keys, then W_UV. Returns [T, H, V] like q_THX.

    q_THX: [T, H, C + R], absorbed and roped, contiguous; cache: [blocks, page, W], contiguous, rows of either layout in
    kv_layout; block_table_NB: int32 or int64; query_starts_N1, seq_lens_N: int32, seq_lens_N 0 for a padding request,
    whose rows give zeros, as do rows beyond the last start. Query i of a request sees keys up to its own position.
    max_query_len: a bound, 1 to 16. w_v_HVC: rows of C contiguous numbers. Raises ValueError for other lengths and
    widths.
    """
    if not 1 <= max_query_len <= MAX_QUERY_LEN:
        raise ValueError(f"max_query_len is {max_query_len}; decode takes 1 to {MAX_QUERY_LEN}, use prefill beyond")
    config = config or _tuned(q_THX.device)
    tokens, heads, width = q_THX.shape
    latent, page, requests = w_v_HVC.shape[2], cache.shape[1], seq_lens_N.shape[0]
    row = kv_rows.row_bytes(cache, latent, width - latent)
    if not q_THX.is_contiguous() or not cache.is_contiguous() or w_v_HVC.stride(2) != 1:
        raise ValueError("queries, cache and W_UV must be contiguous rows of one width; make them so before the call")
    options = launch_options(q_THX.device)
    splits = {"MIN_SPLIT": config.min_split, "MAX_SPLITS": config.max_splits, "REQUESTS": _power_of_two(requests, 32)}
    partial = torch.empty(tokens, heads, config.max_splits, latent, dtype=q_THX.dtype, device=q_THX.device)
    lse = torch.empty(tokens, heads, config.max_splits, dtype=torch.float32, device=q_THX.device)
    hopper = config.hopper and page == 64 and latent % 128 == 0 and width - latent == 64
    hopper = hopper and q_THX.dtype == torch.bfloat16
    rows = min(_power_of_two(heads * max_query_len, 8 if hopper else 16), config.max_rows)
    programs = min(requests * config.max_splits, _num_sms(q_THX.device) * config.programs)
    grid = (programs, triton.cdiv(heads * max_query_len, rows))
    arguments = (block_table_NB, query_starts_N1, seq_lens_N, partial, lse)
    arguments += (block_table_NB.stride(0), requests, scale * 1.4426950408889634)
    constants = {"H": heads, "C": latent, "R": width - latent, "ROWS": rows} | splits
    if hopper:
        mla_decode_hopper.launch(grid, q_THX, cache, arguments, constants, options)
    else:
        tile = {"PAGE": page, "TOKENS": min(config.tokens, page), "STAGES": config.stages, "ROW": row}
        _attend[grid](q_THX, cache, *arguments, **constants, **tile, num_warps=config.warps, **options)
    latent_THC = combine(partial, lse, query_starts_N1, seq_lens_N, splits, config.columns)
    return up_project(latent_THC, w_v_HVC, config.values)


ATTEND_SIGNATURE = {
    "q_ptr": "*bf16", "table_ptr": "*i64", "starts_ptr": "*i32", "lens_ptr": "*i32",
    "partial_ptr": "*bf16", "lse_ptr": "*fp32", "table_stride": "i32", "num_requests": "i32", "scale_log2": "fp32",
}  # fmt: skip


def compile_cases(capability: tuple[int, int], config: DecodeConfig | None = None) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the shapes in use: 8 to 64 heads, 1 to 16 query tokens."""
    config = config or config_for(capability)
    splits = {"MIN_SPLIT": config.min_split, "MAX_SPLITS": config.max_splits, "REQUESTS": 64}
    splits["PDL"] = capability >= (9, 0)
    cases, has_bytes = [], capability >= LEAST_CAPABILITY
    for heads, query_len in ((8, 1), (8, 2), (8, 4), (64, 4)):
        rows = min(_power_of_two(heads * query_len, 8 if config.hopper else 16), config.max_rows)
        constants = {"H": heads, "C": 512, "R": 64, "ROWS": rows} | splits
        name = f"attend {heads}x{query_len}"
        if config.hopper:
            for kind, in_bytes in (("bf16", False), ("fp8", True))[: 2 if heads == 8 else 1]:
                cases.append(mla_decode_hopper.compile_case(f"{name} {kind}", ATTEND_SIGNATURE, constants, in_bytes))
            continue
        constants |= {"PAGE": 64, "TOKENS": config.tokens, "STAGES": config.stages}
        for row, kind in ((0, "*bf16"), (kv_rows.K25_ROW_BYTES, "*u8"))[: 2 if has_bytes and heads == 8 else 1]:
            signature = ATTEND_SIGNATURE | {"cache_ptr": kind}
            cases.append((f"{name} {kind}", _attend, signature, constants | {"ROW": row}, {"num_warps": config.warps}))
    return cases + merge_cases(splits, config.columns, config.values)
