"""Rows of bytes in the latent cache (engine.kernels.kv_layout), as kernels write and read them.

They take the row's bytes as ROW, 0 for plain rows, and find its parts at C and C + 2 R.

Shape letters: C latent width, R rope width, X = C + R, L rows of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels import kv_layout
from engine.kernels.gpu.pdl import launch_options, wait
from engine.kernels.kv_layout import LEAST_CAPABILITY

GATHER_ROWS = 16
K25_ROW_BYTES = kv_layout.places(512, 64).end


def row_bytes(cache: torch.Tensor, latent: int, rope: int) -> int:
    """Of a cache of bytes; 0 of one of numbers. Raises ValueError for widths that no kernel takes, or another width."""
    layout = kv_layout.of(cache)
    if cache.shape[-1] != layout.width(latent, rope):
        raise ValueError(f"a row of {cache.shape[-1]} does not hold {latent} + {rope} numbers; pass the cache's widths")
    if layout is kv_layout.PLAIN:
        return 0
    at = kv_layout.places(latent, rope)
    if (at.rope, at.scale) != (latent, latent + 2 * rope):
        raise ValueError(f"latents of {latent} and roped keys of {rope} numbers leave gaps; use even numbers of each")
    return at.end


@triton.jit
def magnitude_bits(x):
    """Of float32: in the order of magnitudes, what is not finite last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale(largest_bits):
    """As kv_layout.row_scales of the number with these bits: (2^k, 2^-k), bit for bit."""
    exponent = tl.maximum(((largest_bits + 0x1FFFFF) >> 23) - 8, 1)
    scale, inverse = exponent << 23, (254 - exponent) << 23
    scale = tl.where(largest_bits < 0x7F800000, scale, 0x7FC00000)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """The bits of the float8_e4m3fn nearest to each number of at most 448, of two the even; of what is not finite NaN.

    By hand, since it costs nothing here and Triton's interpreter loses a carry."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = magnitude_bits(x)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Added to 2^14, a number is rounded to steps of 2^-9, those below the least normal number, 2^-6.
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    found = tl.where(magnitude < 0x3C800000, steps, normal)
    found = tl.where(magnitude < 0x7F800000, found, 0x7F)
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(bits, dtype: tl.constexpr):
    return bits.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def rope_at(row_ptr, C: tl.constexpr):
    """Where the roped key of rows of bytes begins."""
    return (row_ptr + C).to(tl.pointer_type(tl.bfloat16))


@triton.jit
def scale_at(row_ptr, C: tl.constexpr, R: tl.constexpr):
    return (row_ptr + C + 2 * R).to(tl.pointer_type(tl.float32))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["pages_ptr"])
def _gather(
    cache_ptr, pages_ptr, out_ptr, num_rows, C: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = rows < num_rows
    pages = tl.load(pages_ptr + rows // PAGE, mask=real, other=0).to(tl.int64)
    at = cache_ptr + (pages * PAGE + rows % PAGE) * ROW
    scale = tl.load(scale_at(at, C, R), mask=real, other=0.0)[:, None]
    c, r = tl.arange(0, C)[None, :], tl.arange(0, R)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * (C + R)
    latent = from_e4m3(tl.load(at[:, None] + c, mask=real[:, None], other=0), tl.float32) * scale
    rope = tl.load(rope_at(at, C)[:, None] + r, mask=real[:, None], other=0.0).to(tl.float32) * scale
    tl.store(out + c, latent.to(out_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(out + C + r, rope.to(out_ptr.dtype.element_ty), mask=real[:, None])


def gather(
    cache: torch.Tensor, pages_B: torch.Tensor, num_rows: int, widths: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The first rows of the pages, one after the other, as numbers: [num_rows, C + R]. widths: (C, R)."""
    row, page = row_bytes(cache, *widths), cache.shape[1]
    if not row:
        return cache.index_select(0, pages_B.long()).flatten(0, 1)[:num_rows]
    out_LX = torch.empty(num_rows, sum(widths), dtype=dtype, device=cache.device)
    _gather[(triton.cdiv(num_rows, GATHER_ROWS),)](
        cache, pages_B, out_LX, num_rows, C=widths[0], R=widths[1], PAGE=page, ROW=row, ROWS=GATHER_ROWS, num_warps=4,
        **launch_options(cache.device),
    )  # fmt: skip
    return out_LX


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of K2.5's rows; none where the GPU has no such type."""
    if capability < LEAST_CAPABILITY:
        return []
    signature = {"cache_ptr": "*u8", "pages_ptr": "*i64", "out_ptr": "*bf16", "num_rows": "i32"}
    shape = {"C": 512, "R": 64, "PAGE": 64, "ROW": K25_ROW_BYTES, "ROWS": GATHER_ROWS}
    return [("gather fp8 rows", _gather, signature, shape | {"PDL": capability >= (9, 0)}, {"num_warps": 4})]
