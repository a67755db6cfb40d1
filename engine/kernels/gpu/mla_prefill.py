"""Multi-head latent attention of long chunks in its expanded form (DeepSeek-V2, section 2.1): keys and values a head.

One kernel serves the chunk itself (causal) and blocks of its cached context (unmasked): a call may go on from the
output and log-sum-exp of an earlier one, so that blocks merge inside it and no matrix of scores exists anywhere.

Shape letters: T query tokens, N requests, L keys, H heads, D nope width, R rope width, V value width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.gpu.pdl import launch_options, wait


@dataclass(frozen=True)
class PrefillConfig:
    """queries, keys: rows of a tile; stages: tiles in flight; tma: keys come by the tensor memory accelerator."""

    queries: int = 128
    keys: int = 128
    stages: int = 2
    warps: int = 8
    tma: bool = False


GENERAL = PrefillConfig(queries=64, keys=32, stages=2, warps=4)
CONFIGS = {(9, 0): PrefillConfig(keys=64, stages=3, tma=True)}


def config_for(capability: tuple[int, int]) -> PrefillConfig:
    """The tuned entry, or the general one, which needs no more than 99 KB of shared memory."""
    return CONFIGS.get(capability, GENERAL)


@triton.jit
def _tile(
    q_QD, q_QR, key_KD, key_KR, value_KV, acc_QV, top, denominator, keys_at, num_keys, queries_at, scale_log2,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One tile of keys: online softmax in powers of two."""
    scores = tl.dot(q_QD, tl.trans(key_KD))
    scores = tl.dot(q_QR, tl.trans(key_KR), scores) * scale_log2
    if MASK:
        scores = tl.where((keys_at < num_keys)[None, :], scores, -1e30)
        if CAUSAL:
            scores = tl.where(keys_at[None, :] <= queries_at[:, None], scores, -1e30)
    new_top = tl.maximum(top, tl.max(scores, 1))
    probs = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    denominator = denominator * shrink + tl.sum(probs, 1)
    acc_QV = tl.dot(probs.to(value_KV.dtype), value_KV, acc_QV * shrink[:, None])
    return acc_QV, new_top, denominator


@triton.jit(
    do_not_specialize=["num_query_tiles"], do_not_specialize_on_alignment=["query_starts_ptr", "key_starts_ptr"]
)
def _prefill(
    q_ptr, nope_ptr, rope_ptr, value_ptr, nope_desc, rope_desc, value_desc, query_starts_ptr, key_starts_ptr, out_ptr,
    lse_ptr,
    nope_stride, value_stride, nope_head_stride, value_head_stride, rope_stride, num_query_tiles, scale_log2,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, CAUSAL: tl.constexpr, CARRY: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, n): a tile of queries of one head (heads fastest, long tiles first) of request n."""
    wait(PDL)
    nope_stride = nope_stride.to(tl.int64)
    value_stride = value_stride.to(tl.int64)
    rope_stride = rope_stride.to(tl.int64)
    head = tl.program_id(0) % H
    tile = num_query_tiles - 1 - tl.program_id(0) // H
    first_query = tl.load(query_starts_ptr + tl.program_id(1))
    num_queries = tl.load(query_starts_ptr + tl.program_id(1) + 1) - first_query
    first_key = tl.load(key_starts_ptr + tl.program_id(1)).to(tl.int64)
    num_keys = tl.load(key_starts_ptr + tl.program_id(1) + 1) - first_key.to(tl.int32)
    if tile * QUERIES < num_queries:
        queries = tile * QUERIES + tl.arange(0, QUERIES)
        real = queries < num_queries
        places = (first_query + queries).to(tl.int64) * H + head
        q_rows = q_ptr + places * (D + R)
        q_QD = tl.load(q_rows[:, None] + tl.arange(0, D)[None, :], mask=real[:, None], other=0.0)
        q_QR = tl.load(q_rows[:, None] + D + tl.arange(0, R)[None, :], mask=real[:, None], other=0.0)
        out_rows = out_ptr + places[:, None] * V + tl.arange(0, V)[None, :]
        if CARRY:
            acc_QV = tl.load(out_rows, mask=real[:, None], other=0.0).to(tl.float32)
            top = tl.load(lse_ptr + places, mask=real, other=0.0) * 1.4426950408889634
            denominator = tl.full([QUERIES], 1.0, tl.float32)
        else:
            acc_QV = tl.zeros([QUERIES, V], tl.float32)
            top = tl.full([QUERIES], -1e30, tl.float32)
            denominator = tl.zeros([QUERIES], tl.float32)
        keys = tl.arange(0, KEYS)
        nope_at = nope_ptr + head * nope_head_stride + tl.arange(0, D)[None, :]
        value_at = value_ptr + head * value_head_stride + tl.arange(0, V)[None, :]
        rope_at = rope_ptr + tl.arange(0, R)[None, :]
        # Queries are the last positions of their keys where the call is causal.
        queries_at = queries + num_keys - num_queries
        stop = num_keys
        whole = num_keys // KEYS
        if CAUSAL:
            stop = tl.minimum(num_keys, (tile + 1) * QUERIES + num_keys - num_queries)
            whole = tl.minimum(whole, (tile * QUERIES + num_keys - num_queries + 1) // KEYS)
        for t in tl.range(0, whole * KEYS, KEYS, num_stages=STAGES):
            if TMA:
                first = first_key.to(tl.int32) + t
                key_KD = nope_desc.load([head, first, 0]).reshape(KEYS, D)
                key_KR = rope_desc.load([first, 0])
                value_KV = value_desc.load([head, first, 0]).reshape(KEYS, V)
            else:
                rows = (first_key + t + keys)[:, None]
                key_KD = tl.load(nope_at + rows * nope_stride)
                key_KR = tl.load(rope_at + rows * rope_stride)
                value_KV = tl.load(value_at + rows * value_stride)
            acc_QV, top, denominator = _tile(
                q_QD, q_QR, key_KD, key_KR, value_KV, acc_QV, top, denominator, t + keys, num_keys, queries_at,
                scale_log2, False, CAUSAL,
            )  # fmt: skip
        for t in tl.range(whole * KEYS, stop, KEYS, num_stages=1):
            rows = (first_key + t + keys)[:, None]
            written = (t + keys < num_keys)[:, None]
            acc_QV, top, denominator = _tile(
                q_QD, q_QR, tl.load(nope_at + rows * nope_stride, mask=written, other=0.0),
                tl.load(rope_at + rows * rope_stride, mask=written, other=0.0),
                tl.load(value_at + rows * value_stride, mask=written, other=0.0), acc_QV, top, denominator, t + keys,
                num_keys, queries_at, scale_log2, True, CAUSAL,
            )  # fmt: skip
        denominator = tl.maximum(denominator, 1e-30)
        tl.store(out_rows, (acc_QV / denominator[:, None]).to(out_ptr.dtype.element_ty), mask=real[:, None])
        tl.store(lse_ptr + places, (top + tl.log2(denominator)) * 0.6931471805599453, mask=real)


def _tuned(device: torch.device) -> PrefillConfig:
    return config_for(torch.cuda.get_device_capability(device)) if device.type == "cuda" else GENERAL


def _sources(key_LHD: torch.Tensor, rope_LR: torch.Tensor, value_LHV: torch.Tensor, config: PrefillConfig) -> tuple:
    """Descriptors of tiles of one head's keys, of the shared ones and of one head's values."""
    if not config.tma:
        return key_LHD, rope_LR, value_LHV
    heads = [
        TensorDescriptor.from_tensor(rows.transpose(0, 1), [1, config.keys, rows.shape[2]])
        for rows in (key_LHD, value_LHV)
    ]
    return heads[0], TensorDescriptor.from_tensor(rope_LR, [config.keys, rope_LR.shape[1]]), heads[1]


def mla_prefill(
    q_THX: torch.Tensor,
    key_LHD: torch.Tensor,
    rope_LR: torch.Tensor,
    value_LHV: torch.Tensor,
    query_starts_N1: torch.Tensor,
    key_starts_N1: torch.Tensor,
    scale: float,
    max_query_len: int,
    causal: bool,
    carry: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: PrefillConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's queries over its keys. Returns out [T, H, V] and lse float32 [T, H].

    q_THX: [T, H, D + R], contiguous; rope_LR: the roped key that all heads share; rows of D, R and V are contiguous.
    query_starts_N1, key_starts_N1: int32. causal: query i of a request sees keys up to i from its last ones; else all.
    carry: (out, lse) of the same queries over other keys; merged by log-sum-exp and overwritten. Without carry out has
    q's dtype; a carried one is best float32.
    """
    config = config or _tuned(q_THX.device)
    tokens, heads, width = q_THX.shape
    if carry is None:
        out = torch.empty(tokens, heads, value_LHV.shape[2], dtype=q_THX.dtype, device=q_THX.device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q_THX.device)
    else:
        out, lse = carry
    tiles = triton.cdiv(max_query_len, config.queries)
    _prefill[(tiles * heads, query_starts_N1.shape[0] - 1)](
        q_THX, key_LHD, rope_LR, value_LHV, *_sources(key_LHD, rope_LR, value_LHV, config), query_starts_N1,
        key_starts_N1, out, lse,
        key_LHD.stride(0), value_LHV.stride(0), key_LHD.stride(1), value_LHV.stride(1), rope_LR.stride(0), tiles,
        scale * 1.4426950408889634, H=heads, D=key_LHD.shape[2], R=width - key_LHD.shape[2], V=value_LHV.shape[2],
        QUERIES=config.queries, KEYS=config.keys, STAGES=config.stages, CAUSAL=causal, CARRY=carry is not None,
        TMA=config.tma, num_warps=config.warps, **launch_options(q_THX.device),
    )  # fmt: skip
    return out, lse


SIGNATURE = {
    **dict.fromkeys(("q_ptr", "nope_ptr", "rope_ptr", "value_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("query_starts_ptr", "key_starts_ptr"), "*i32"),
    **dict.fromkeys(("nope_stride", "value_stride", "nope_head_stride", "value_head_stride", "rope_stride"), "i32"),
    "lse_ptr": "*fp32", "num_query_tiles": "i32", "scale_log2": "fp32",
}  # fmt: skip


def compile_cases(capability: tuple[int, int], config: PrefillConfig | None = None) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the shapes in use."""
    config = config or config_for(capability)
    tiles = {"QUERIES": config.queries, "KEYS": config.keys, "STAGES": config.stages, "PDL": capability >= (9, 0)}
    shape = {"H": 8, "D": 128, "R": 64, "V": 128, "TMA": config.tma} | tiles
    of_head, shared = f"tensordesc<bf16[1,{config.keys},128]>", f"tensordesc<bf16[{config.keys},64]>"
    kinds = (of_head, shared, of_head) if config.tma else ("*bf16",) * 3
    signature = SIGNATURE | dict(zip(("nope_desc", "rope_desc", "value_desc"), kinds, strict=True))
    return [
        ("chunk", _prefill, signature, shape | {"CAUSAL": True, "CARRY": False}, {"num_warps": config.warps}),
        ("context", _prefill, signature, shape | {"CAUSAL": False, "CARRY": True}, {"num_warps": config.warps}),
    ]
