"""Residual sum and RMSNorm in one pass over a row. Shape letters: T rows, D width, P parts of a split sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl

WARPS = 16


@triton.jit
def normalized(row, weight, width, eps):
    """RMSNorm of one float32 row with the checkpoint's rounding: to the weight's type before it is multiplied."""
    inverse = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    return (row * inverse).to(weight.dtype) * weight


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_kernel(
    partial_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    new_residual_ptr,
    num_rows,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    pdl.wait(PDL)
    residual = tl.load(residual_ptr + row * D + d, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for part in tl.static_range(PARTS):
        rows = part * num_rows + row
        total += tl.load(partial_ptr + rows * D + d, mask=inside, other=0.0).to(tl.float32)
    residual = (residual.to(tl.float32) + total.to(residual.dtype).to(tl.float32)).to(residual.dtype)
    tl.store(new_residual_ptr + row * D + d, residual, mask=inside)
    tl.store(out_ptr + row * D + d, normalized(residual.to(tl.float32), weight, D, eps), mask=inside)


@triton.jit(do_not_specialize=["count"])
def sum_parts_kernel(parts_ptr, out_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pdl.wait(PDL)
    total = tl.load(parts_ptr + i, mask=i < count, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * count.to(tl.int64) + i, mask=i < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < count)


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, eps, X_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    pdl.wait(PDL)
    x = tl.load(x_ptr + row * X_STRIDE + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, normalized(x, weight, D, eps), mask=inside)


@triton.jit
def silu(gate, dtype: tl.constexpr):
    """silu in float32, rounded to `dtype` as a product's result would be; float32."""
    gate = gate.to(dtype).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)


@triton.jit
def silu_mul_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pdl.wait(PDL)
    gate = tl.load(x_ptr + row * 2 * width + i, mask=i < width, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + i, mask=i < width, other=0.0)
    tl.store(out_ptr + row * width + i, (silu(gate, dtype) * up.to(tl.float32)).to(dtype), mask=i < width)


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for rows [gate | up]."""
    num_rows, width = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = torch.empty(num_rows, width, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    silu_mul_kernel[(num_rows, triton.cdiv(width, 1024))](
        gate_up_TI, out_TI, width, BLOCK=1024, **pdl.launch_options(gate_up_TI.device)
    )
    return out_TI


def sum_parts(parts_PTD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, D] in `dtype`: the parts, of any float type, added in order in float32."""
    out_TD = torch.empty(parts_PTD.shape[1:], dtype=dtype, device=parts_PTD.device)
    sum_parts_kernel[(triton.cdiv(out_TD.numel(), 1024),)](
        parts_PTD, out_TD, out_TD.numel(), PARTS=parts_PTD.shape[0], BLOCK=1024, **pdl.launch_options(out_TD.device)
    )
    return out_TD


def add_norm(
    partial: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + partial, and its RMSNorm -> (x [T, D], residual [T, D]).

    partial: [T, D] or parts [P, T, D] to be added up in order, any float type.
    """
    num_rows, width = residual_TD.shape
    out_TD, new_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    add_norm_kernel[(num_rows,)](
        partial,
        residual_TD,
        weight_D,
        out_TD,
        new_TD,
        num_rows,
        eps,
        D=width,
        BLOCK_D=triton.next_power_of_2(width),
        PARTS=partial.shape[0] if partial.dim() == 3 else 1,
        num_warps=WARPS,
        **pdl.launch_options(residual_TD.device),
    )
    return out_TD, new_TD


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """[T, D] of rows that may lie apart. Raises ValueError where a row's own numbers do."""
    num_rows, width = x_TD.shape
    if x_TD.stride(1) != 1:
        raise ValueError("the numbers of a row lie apart; make them contiguous before the norm")
    out_TD = torch.empty(num_rows, width, dtype=x_TD.dtype, device=x_TD.device)
    rms_norm_kernel[(num_rows,)](
        x_TD,
        weight_D,
        out_TD,
        eps,
        X_STRIDE=x_TD.stride(0) if num_rows > 1 else width,
        D=width,
        BLOCK_D=triton.next_power_of_2(width),
        num_warps=WARPS,
        **pdl.launch_options(x_TD.device),
    )
    return out_TD


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) at K2.5's widths."""
    pdl_on = {"PDL": capability >= (9, 0)}
    row = {"D": 7168, "BLOCK_D": 8192} | pdl_on
    rows = dict.fromkeys(("residual_ptr", "weight_ptr", "out_ptr", "new_residual_ptr"), "*bf16")
    rows |= {"num_rows": "i32", "eps": "fp32"}
    one = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "eps": "fp32"}
    gate_up = {"x_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32"}
    warps = {"num_warps": WARPS}
    return [
        ("add_norm 1", add_norm_kernel, rows | {"partial_ptr": "*fp32"}, row | {"PARTS": 1}, warps),
        ("add_norm 4", add_norm_kernel, rows | {"partial_ptr": "*fp32"}, row | {"PARTS": 4}, warps),
        ("add_norm 9", add_norm_kernel, rows | {"partial_ptr": "*bf16"}, row | {"PARTS": 9}, {"num_warps": 16}),
        ("rms_norm", rms_norm_kernel, one, row | {"X_STRIDE": 7168}, warps),
        (
            "rms_norm of three layers",
            rms_norm_kernel,
            one,
            {"X_STRIDE": 21504, "D": 21504, "BLOCK_D": 32768} | pdl_on,
            warps,
        ),
        (
            "sum_parts",
            sum_parts_kernel,
            {"parts_ptr": "*fp32", "out_ptr": "*bf16", "count": "i32"},
            {"PARTS": 4, "BLOCK": 1024} | pdl_on,
            {},
        ),
        ("silu_mul", silu_mul_kernel, gate_up, {"BLOCK": 1024} | pdl_on, {}),
    ]
