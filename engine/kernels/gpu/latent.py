"""What MLA does between its products: both latent norms, rope, the cache write, and the absorbed query.

Shape letters: T rows, P parts of a split sum, Q query latent width, C KV latent width, R rope width, H heads,
N nope width of a head, X = C + R.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import kv_rows, pdl
from engine.kernels.gpu.dense import tile_rows
from engine.kernels.gpu.kv_rows import from_e4m3, magnitude_bits, rope_at, row_scale, scale_at, to_e4m3
from engine.kernels.gpu.norm import normalized
from engine.kernels.kv_layout import LEAST_CAPABILITY

LATENT_WARPS = 16


@triton.jit
def sum_parts(ptr, offsets, mask, part_stride, PARTS: tl.constexpr, dtype: tl.constexpr):
    """The parts of a split product added up in order and rounded to the type the whole product would have had."""
    total = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * part_stride + offsets, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def latents_kernel(
    parts_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    angles_ptr,
    slots_ptr,
    q_ptr,
    rows_ptr,
    cache_ptr,
    num_rows,
    eps,
    Q: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NORM_Q: tl.constexpr,
    PARTS: tl.constexpr,
    ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) makes row t's cache row, (t, 1) its query latent. Into rows of ROW bytes what is stored is rounded
    (kv_rows), and the row that is handed on is rounded alike."""
    row = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = Q + C + R
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    parts_ptr += row * width
    stride = num_rows.to(tl.int64) * width
    if tl.program_id(1) == 0:
        c, pair = tl.arange(0, C), tl.arange(0, R // 2)
        kv_weight = tl.load(kv_weight_ptr + c)
        pdl.wait(PDL)
        cache_ptr += tl.load(slots_ptr + row) * (ROW if ROW else C + R)
        everywhere = c >= 0
        latent = sum_parts(parts_ptr + Q, c, everywhere, stride, PARTS, dtype)
        latent = normalized(latent, kv_weight, C, eps)
        rows_ptr += row * (C + R)
        if ROW:
            scale, inverse = row_scale(tl.max(magnitude_bits(latent.to(tl.float32)), 0))
            stored = to_e4m3(latent.to(tl.float32) * inverse)
            tl.store(cache_ptr + c, stored)
            tl.store(scale_at(cache_ptr, C, R), scale)
            latent = (from_e4m3(stored, tl.float32) * scale).to(dtype)
        else:
            tl.store(cache_ptr + c, latent)
        tl.store(rows_ptr + c, latent)
        cos = tl.load(angles_ptr + row * R + 2 * pair)
        sin = tl.load(angles_ptr + row * R + 2 * pair + 1)
        even = sum_parts(parts_ptr + Q + C, 2 * pair, pair >= 0, stride, PARTS, dtype)
        odd = sum_parts(parts_ptr + Q + C + 1, 2 * pair, pair >= 0, stride, PARTS, dtype)
        turned_even, turned_odd = (even * cos - odd * sin).to(dtype), (even * sin + odd * cos).to(dtype)
        if ROW:
            stored_even = (turned_even.to(tl.float32) * inverse).to(tl.bfloat16)
            stored_odd = (turned_odd.to(tl.float32) * inverse).to(tl.bfloat16)
            tl.store(rope_at(cache_ptr, C) + 2 * pair, stored_even)
            tl.store(rope_at(cache_ptr, C) + 2 * pair + 1, stored_odd)
            turned_even = (stored_even.to(tl.float32) * scale).to(dtype)
            turned_odd = (stored_odd.to(tl.float32) * scale).to(dtype)
        else:
            tl.store(cache_ptr + C + 2 * pair, turned_even)
            tl.store(cache_ptr + C + 2 * pair + 1, turned_odd)
        tl.store(rows_ptr + C + 2 * pair, turned_even)
        tl.store(rows_ptr + C + 2 * pair + 1, turned_odd)
    else:
        q = tl.arange(0, BLOCK_Q)
        if NORM_Q:
            q_weight = tl.load(q_weight_ptr + q, mask=q < Q, other=0.0)
        pdl.wait(PDL)
        query = sum_parts(parts_ptr, q, q < Q, stride, PARTS, dtype)
        if NORM_Q:
            query = normalized(query, q_weight, Q, eps).to(tl.float32)
        tl.store(q_ptr + row * Q + q, query.to(dtype), mask=q < Q)


@triton.jit(do_not_specialize=["num_rows"])
def absorb_kernel(
    parts_ptr,
    w_ptr,
    angles_ptr,
    out_ptr,
    num_rows,
    head_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (h, c) makes a slice of head h's latent query; the last c of each head ropes the rest."""
    head, tile = tl.program_id(0), tl.program_id(1)
    t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = t < num_rows
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    stride = num_rows.to(tl.int64) * (H * (N + R))
    part_rows = t.to(tl.int64) * (H * (N + R)) + head * (N + R)
    out_rows = (t.to(tl.int64) * H + head) * (C + R)
    if tile < C // BLOCK_C:
        n, c = tl.arange(0, N), tile * BLOCK_C + tl.arange(0, BLOCK_C)
        w = tl.load(w_ptr + head.to(tl.int64) * head_stride + n[:, None] * C + c[None, :])
        pdl.wait(PDL)
        offsets = part_rows[:, None] + n[None, :]
        q = sum_parts(parts_ptr, offsets, is_row[:, None], stride, PARTS, dtype).to(dtype)
        latent = tl.dot(tl.trans(w), tl.trans(q))
        tl.store(out_ptr + out_rows[:, None] + c[None, :], tl.trans(latent).to(dtype), mask=is_row[:, None])
    else:
        pair = tl.arange(0, R // 2)
        pdl.wait(PDL)
        angles = t.to(tl.int64)[:, None] * R + 2 * pair[None, :]
        mask = is_row[:, None] & (pair >= 0)[None, :]
        cos = tl.load(angles_ptr + angles, mask=mask, other=0.0)
        sin = tl.load(angles_ptr + angles + 1, mask=mask, other=0.0)
        turned = part_rows[:, None] + N + 2 * pair[None, :]
        even = sum_parts(parts_ptr, turned, mask, stride, PARTS, dtype)
        odd = sum_parts(parts_ptr, turned + 1, mask, stride, PARTS, dtype)
        out = out_ptr + out_rows[:, None] + C + 2 * pair[None, :]
        tl.store(out, (even * cos - odd * sin).to(dtype), mask=mask)
        tl.store(out + 1, (even * sin + odd * cos).to(dtype), mask=mask)


def latents(
    parts_PTW: torch.Tensor,
    q_weight_Q: torch.Tensor | None,
    kv_weight_C: torch.Tensor,
    eps: float,
    angles_TR: torch.Tensor,
    cache: torch.Tensor,
    slots_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms the query latent, [T, Q]; norms and ropes the KV rows, [T, X], and writes them to their cache slots.

    parts_PTW: float32 parts of x's product with [q_a | kv_a], W = Q + C + R; Q may be 0. angles_TR: (cos, sin) of each
    pair.
    """
    num_parts, num_rows, width = parts_PTW.shape
    width_c, width_r = kv_weight_C.shape[0], angles_TR.shape[1]
    width_q = width - width_c - width_r
    q_TQ = torch.empty(num_rows, width_q, dtype=kv_weight_C.dtype, device=parts_PTW.device)
    rows_TX = torch.empty(num_rows, width_c + width_r, dtype=kv_weight_C.dtype, device=parts_PTW.device)
    latents_kernel[(num_rows, 2 if width_q else 1)](
        parts_PTW,
        q_weight_Q,
        kv_weight_C,
        angles_TR,
        slots_T,
        q_TQ,
        rows_TX,
        cache,
        num_rows,
        eps,
        Q=width_q,
        C=width_c,
        R=width_r,
        BLOCK_Q=triton.next_power_of_2(max(width_q, 1)),
        NORM_Q=q_weight_Q is not None,
        PARTS=num_parts,
        ROW=kv_rows.row_bytes(cache, width_c, width_r),
        num_warps=LATENT_WARPS,
        **pdl.launch_options(parts_PTW.device),
    )
    return q_TQ, rows_TX


def absorb(
    parts_PTW: torch.Tensor,
    w_k_HNC: torch.Tensor,
    angles_TR: torch.Tensor,
    block_c: int = 64,
) -> torch.Tensor:
    """Queries for the latent cache, [T, H, X]: each head's nope part times W_k, its rope part turned.

    parts_PTW: float32 parts of the query product, W = H * (N + R). w_k_HNC: a view whose heads lie apart.
    """
    num_parts, num_rows, _ = parts_PTW.shape
    num_heads, nope, width_c = w_k_HNC.shape
    rope = angles_TR.shape[1]
    out_THX = torch.empty(num_rows, num_heads, width_c + rope, dtype=w_k_HNC.dtype, device=parts_PTW.device)
    rows = tile_rows(num_rows)
    tiles = width_c // block_c + 1
    absorb_kernel[(num_heads, tiles, triton.cdiv(num_rows, rows))](
        parts_PTW,
        w_k_HNC,
        angles_TR,
        out_THX,
        num_rows,
        w_k_HNC.stride(0),
        H=num_heads,
        N=nope,
        R=rope,
        C=width_c,
        BLOCK_C=block_c,
        ROWS=rows,
        PARTS=num_parts,
        num_warps=4,
        **pdl.launch_options(parts_PTW.device),
    )
    return out_THX


@triton.jit
def rope_kernel(q_ptr, angles_ptr, H, WIDTH, N, R: tl.constexpr, PDL: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, R // 2)
    pdl.wait(PDL)
    cos = tl.load(angles_ptr + row * R + 2 * pair)
    sin = tl.load(angles_ptr + row * R + 2 * pair + 1)
    q_ptr += (row * H + head) * WIDTH + N + 2 * pair
    even, odd = tl.load(q_ptr).to(tl.float32), tl.load(q_ptr + 1).to(tl.float32)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    tl.store(q_ptr, (even * cos - odd * sin).to(dtype))
    tl.store(q_ptr + 1, (even * sin + odd * cos).to(dtype))


def rope_in_place(q_THX: torch.Tensor, nope: int, angles_TR: torch.Tensor) -> torch.Tensor:
    """Turns the rope part of each head's query, [T, H, N + R], where it lies."""
    num_rows, num_heads, width = q_THX.shape
    rope_kernel[(num_rows, num_heads)](
        q_THX, angles_TR, num_heads, width, nope, R=angles_TR.shape[1], num_warps=1, **pdl.launch_options(q_THX.device)
    )
    return q_THX


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of K2.5's latents and of the 8 heads of a rank of 8."""
    pdl_on = {"PDL": capability >= (9, 0)}
    latent = dict.fromkeys(("q_weight_ptr", "kv_weight_ptr", "q_ptr", "rows_ptr", "cache_ptr"), "*bf16")
    latent |= {"parts_ptr": "*fp32", "angles_ptr": "*fp32", "slots_ptr": "*i64", "num_rows": "i32", "eps": "fp32"}
    query = {"parts_ptr": "*fp32", "w_ptr": "*bf16", "angles_ptr": "*fp32", "out_ptr": "*bf16", "num_rows": "i32"}
    query["head_stride"] = "i32"
    widths = {"Q": 1536, "C": 512, "R": 64, "BLOCK_Q": 2048, "NORM_Q": True, "ROW": 0} | pdl_on
    to_bytes = {"ROW": kv_rows.K25_ROW_BYTES} if capability >= LEAST_CAPABILITY else {}
    heads = {"H": 8, "N": 128, "R": 64, "C": 512, "BLOCK_C": 64} | pdl_on
    turned = {"q_ptr": "*bf16", "angles_ptr": "*fp32"} | dict.fromkeys(("H", "WIDTH", "N"), "i32")
    return [
        ("latents", latents_kernel, latent, widths | {"PARTS": 8}, {"num_warps": LATENT_WARPS}),
        ("latents to bytes", latents_kernel, latent | dict.fromkeys(("cache_ptr",) if to_bytes else (), "*u8"),
         widths | {"PARTS": 8} | to_bytes, {"num_warps": LATENT_WARPS}),
        ("latents of keys alone", latents_kernel, latent,
         widths | {"Q": 0, "BLOCK_Q": 1, "NORM_Q": False, "PARTS": 16}, {"num_warps": LATENT_WARPS}),
        *(
            (f"absorb {rows} rows", absorb_kernel, query,
             heads | {"ROWS": rows, "PARTS": 2}, {"num_warps": 4})
            for rows in (16, 64)
        ),
        ("rope", rope_kernel, turned, {"R": 64} | pdl_on, {"num_warps": 1}),
    ]  # fmt: skip
