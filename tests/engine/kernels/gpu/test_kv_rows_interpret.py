"""Rows of bytes under Triton's interpreter: the number type's bits, the scale's, and the gather of a context."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import kv_layout
from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
import triton
import triton.language as tl

from engine.kernels.gpu import kv_rows

if INTERPRETED:
    allow_scalar_arrays()


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


@triton.jit
def _convert(x_ptr, bits_ptr, back_ptr, scale_ptr, inverse_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    bits = kv_rows.to_e4m3(x)
    scale, inverse = kv_rows.row_scale(kv_rows.magnitude_bits(x))
    tl.store(bits_ptr + i, bits)
    tl.store(back_ptr + i, kv_rows.from_e4m3(bits, tl.float32))
    tl.store(scale_ptr + i, scale)
    tl.store(inverse_ptr + i, inverse)


@interpreted
def test_conversions_have_the_bits_of_the_library():
    """All 256 numbers, those half way between two, their neighbours in float32, and many of every size."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    finite = every[~every.isnan()].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    sizes = torch.logspace(-5, 2.6, 3000) * torch.randn(3000, generator=torch.Generator().manual_seed(0)).sign()
    around = [torch.nextafter(between, torch.full_like(between, to)) for to in (-1e9, 1e9)]
    x = torch.cat([every, between, *around, sizes, torch.tensor([0.0, -0.0, float("nan")])])
    x = torch.nn.functional.pad(x, (0, 4096 - len(x)))
    bits, outs = torch.empty(4096, dtype=torch.uint8), torch.empty(3, 4096)
    _convert[(1,)](x, bits, *outs, N=4096)
    expected = x.to(torch.float8_e4m3fn)
    nan = expected.float().isnan()
    assert torch.equal(bits[~nan], expected.view(torch.uint8)[~nan]) and int(nan.sum()) == 3
    assert torch.equal(outs[0][~nan], expected.float()[~nan]) and (bits[nan] & 127 == 127).all()
    scale, inverse = kv_layout.row_scales(x.abs())
    assert torch.equal(outs[1].nan_to_num(7.0), scale.nan_to_num(7.0)) and torch.equal(outs[2], inverse)
    assert torch.equal(outs[1].isnan(), x.isnan())


@interpreted
@pytest.mark.parametrize("num_rows", [1, 16, 17, 40])
def test_a_context_is_gathered_as_numbers(num_rows):
    rows = torch.randn(6, 16, 48, generator=torch.Generator().manual_seed(1))
    pages = torch.tensor([4, 1, 3])
    packed = kv_layout.FP8.pack(rows, 32)
    packed[0] = packed[2] = packed[5] = 255
    got = kv_rows.gather(packed, pages, num_rows, (32, 16), torch.float32)
    expected = kv_layout.FP8.unpack(packed[pages].flatten(0, 1)[:num_rows], 32, 16, torch.float32)
    assert torch.equal(got, expected) and got.isfinite().all()


@pytest.mark.parametrize("latent", [15, 33])
def test_odd_widths_are_refused(latent):
    cache = torch.zeros(1, 16, kv_layout.FP8.width(latent, 3), dtype=torch.uint8)
    with pytest.raises(ValueError, match="use even numbers"):
        kv_rows.row_bytes(cache, latent, 3)
