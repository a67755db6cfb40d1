"""What follows the splits of a decode step: their sums are merged by log-sum-exp, then multiplied by W_UV.

Two kernels of many small programs: every partial sum is read once, all of them in flight together; the weight's tile is
there before the merged latents are. Shape letters as in mla_decode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.mla_decode_hopper import SPECIALIZATION
from engine.kernels.gpu.pdl import launch_options, wait

COLUMNS_A_WARP = 32  # of the kernel that merges; one warp alone never waits for another
ROWS = 16  # tokens a program of the up-projection, whatever their number


@triton.jit
def split_size(length, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys a split of a row that sees `length` keys: the smallest multiple of 64 that needs at most MAX_SPLITS."""
    return tl.maximum(((length + MAX_SPLITS * 64 - 1) // (MAX_SPLITS * 64)) * 64, MIN_SPLIT)


@triton.jit(**SPECIALIZATION)
def _combine(
    partial_ptr, lse_ptr, starts_ptr, lens_ptr, out_ptr, num_requests, H: tl.constexpr, C: tl.constexpr,
    COLUMNS: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (r, c): a slice of row r of all tokens' heads. The kernel just before wrote no lengths."""
    row = tl.program_id(0) // H
    requests = tl.arange(0, REQUESTS)
    known = requests < num_requests
    stops = tl.load(starts_ptr + 1 + requests, mask=known, other=2147483647)
    lens = tl.load(lens_ptr + requests, mask=known, other=0)
    mine = requests == tl.sum((stops <= row).to(tl.int32), 0)
    seq_len = tl.sum(tl.where(mine & known, lens, 0), 0)
    stop_row = tl.sum(tl.where(mine & known, stops, 0), 0)
    length = tl.where(seq_len > 0, seq_len - (stop_row - 1 - row), 0)
    size = split_size(length, MIN_SPLIT, MAX_SPLITS)
    splits = tl.arange(0, MAX_SPLITS)
    here = splits < (length + size - 1) // size
    places = tl.program_id(0).to(tl.int64) * MAX_SPLITS + splits
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    parts_at = partial_ptr + places[:, None] * C + columns[None, :]
    wait(PDL)
    lse = tl.load(lse_ptr + places, mask=here, other=-1e30)
    parts = tl.load(parts_at, mask=here[:, None], other=0.0)
    weights = tl.where(here, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    merged = tl.sum(parts.to(tl.float32) * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * C + columns, merged.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_tokens"])
def _up_project(
    latent_ptr, w_ptr, out_ptr, num_tokens, w_head_stride, w_value_stride, H: tl.constexpr, C: tl.constexpr,
    V: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, v, t): VALUES columns of head h for ROWS tokens; the weight lies on the M side of the product.

    The product is cut in four along C: one long chain of sums would be most of the time."""
    head = tl.program_id(0)
    values = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    tokens = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, 4)[:, None] * (C // 4) + tl.arange(0, C // 4)[None, :]
    w_rows = w_ptr + head.to(tl.int64) * w_head_stride + values * w_value_stride
    w_4VC = tl.load(w_rows[None, :, None] + columns[:, None, :])
    places = tokens.to(tl.int64) * H + head
    real = (tokens < num_tokens)[:, None]
    wait(PDL)
    latent_4TC = tl.load(latent_ptr + places[None, :, None] * C + columns[:, None, :], mask=real[None], other=0.0)
    out_VT = tl.sum(tl.dot(w_4VC, tl.permute(latent_4TC, (0, 2, 1))), 0)
    out_rows = out_ptr + places[:, None] * V + values[None, :]
    tl.store(out_rows, tl.trans(out_VT).to(out_ptr.dtype.element_ty), mask=real)


def combine(
    partial_THSC: torch.Tensor,
    lse_THS: torch.Tensor,
    query_starts_N1: torch.Tensor,
    seq_lens_N: torch.Tensor,
    splits: dict[str, int],
    columns: int,
) -> torch.Tensor:
    """The merged latents [T, H, C] in the partial sums' type; zeros for rows without keys. splits: the units' rule."""
    tokens, heads, _splits, latent = partial_THSC.shape
    out_THC = torch.empty(tokens, heads, latent, dtype=partial_THSC.dtype, device=partial_THSC.device)
    columns = min(columns, latent)
    _combine[(tokens * heads, latent // columns)](
        partial_THSC, lse_THS, query_starts_N1, seq_lens_N, out_THC, seq_lens_N.shape[0], H=heads, C=latent,
        COLUMNS=columns, **splits, num_warps=max(1, columns // COLUMNS_A_WARP), **launch_options(out_THC.device),
    )  # fmt: skip
    return out_THC


def up_project(latent_THC: torch.Tensor, w_v_HVC: torch.Tensor, values: int) -> torch.Tensor:
    """[T, H, V]: each head's merged latents times W_UV, whose rows of C numbers are contiguous."""
    tokens, heads, latent = latent_THC.shape
    width = w_v_HVC.shape[1]
    out_THV = torch.empty(tokens, heads, width, dtype=latent_THC.dtype, device=latent_THC.device)
    values = min(values, width)
    _up_project[(heads, width // values, triton.cdiv(tokens, ROWS))](
        latent_THC, w_v_HVC, out_THV, tokens, w_v_HVC.stride(0), w_v_HVC.stride(1), H=heads, C=latent, V=width,
        VALUES=values, ROWS=ROWS, num_warps=4, **launch_options(out_THV.device),
    )  # fmt: skip
    return out_THV


COMBINE_SIGNATURE = {
    "partial_ptr": "*bf16", "lse_ptr": "*fp32", "starts_ptr": "*i32", "lens_ptr": "*i32", "out_ptr": "*bf16",
    "num_requests": "i32",
}  # fmt: skip
UP_PROJECT_SIGNATURE = {
    "latent_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*bf16", "num_tokens": "i32", "w_head_stride": "i32",
    "w_value_stride": "i32",
}  # fmt: skip


def merge_cases(splits: dict[str, int], columns: int, values: int) -> list[tuple]:
    """The share of mla_decode.compile_cases; splits: the units' rule and PDL."""
    shape = {"H": 8, "C": 512}
    merged = shape | {"COLUMNS": columns} | splits
    cases = [("combine", _combine, COMBINE_SIGNATURE, merged, {"num_warps": max(1, columns // COLUMNS_A_WARP)})]
    constants = shape | {"V": 128, "VALUES": values, "ROWS": ROWS, "PDL": splits["PDL"]}
    return [*cases, ("up_project", _up_project, UP_PROJECT_SIGNATURE, constants, {"num_warps": 4})]
