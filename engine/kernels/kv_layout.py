"""How a token's row lies in the latent cache: as numbers of the model's type, or in bytes with the latent in FP8.

A row of bytes is [C latents, float8_e4m3fn | R roped numbers, bfloat16 | scale, float32 | nothing up to 16 bytes]; the
numbers are scale times what is stored. The scale is the least power of two that keeps the largest latent within 448.
So no outlier is clipped, and scale times stored is exact in bfloat16: kernels that multiply scores and weights by it
and kernels that multiply the row attend to the very same numbers. A finer scale gains nothing, since both types have
an exponent of their own. Which of the two a cache holds, its dtype tells.

Shape letters: C latent width, R rope width, X = C + R, W elements of a row as stored.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

LEAST_CAPABILITY = (8, 9)  # of a GPU: the first whose kernels know float8_e4m3fn
ROW_ALIGNMENT = 16  # bytes; what the tensor memory accelerator asks of a row's stride
_LARGEST_EXPONENT = 8  # 448 = 1.75 * 2^8, the largest float8_e4m3fn
_MANTISSA_BITS = 23
_BEYOND_1_75 = 0x1FFFFF  # added to float32 bits, carries into the exponent where the mantissa is above 1.75


class RowLayout(Protocol):
    """What holds rows of a latent cache: [..., W] elements of `dtype(model's)` for [..., X] numbers."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype: ...

    def width(self, latent: int, rope: int) -> int: ...

    def pack(self, rows_X: torch.Tensor, latent: int) -> torch.Tensor:
        """[..., X] -> [..., W]."""

    def unpack(self, rows_W: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
        """[..., W] -> [..., X] in `dtype`."""


class PlainRows:
    """The numbers themselves."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def width(self, latent: int, rope: int) -> int:
        return latent + rope

    def pack(self, rows_X: torch.Tensor, latent: int) -> torch.Tensor:
        return rows_X

    def unpack(self, rows_W: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
        return rows_W.to(dtype)


class Places(NamedTuple):
    """Where in a row of bytes its parts begin, and where it ends."""

    rope: int
    scale: int
    end: int


def places(latent: int, rope: int) -> Places:
    rope_at = _round_up(latent, 2)
    scale_at = _round_up(rope_at + 2 * rope, 4)
    return Places(rope_at, scale_at, _round_up(scale_at + 4, ROW_ALIGNMENT))


class Fp8Rows:
    """Bytes; see the module."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def width(self, latent: int, rope: int) -> int:
        return places(latent, rope).end

    def pack(self, rows_X: torch.Tensor, latent: int) -> torch.Tensor:
        rope = rows_X.shape[-1] - latent
        at = places(latent, rope)
        scale_1, inverse_1 = row_scales(rows_X[..., :latent].float().abs().amax(-1, keepdim=True))
        stored_X = rows_X.float() * inverse_1
        rows_W = torch.zeros(*rows_X.shape[:-1], at.end, dtype=torch.uint8, device=rows_X.device)
        rows_W[..., :latent] = stored_X[..., :latent].to(torch.float8_e4m3fn).view(torch.uint8)
        rows_W[..., at.rope : at.rope + 2 * rope] = stored_X[..., latent:].to(torch.bfloat16).view(torch.uint8)
        rows_W[..., at.scale : at.scale + 4] = scale_1.view(torch.uint8)
        return rows_W

    def unpack(self, rows_W: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
        at = places(latent, rope)
        latent_C = rows_W[..., :latent].view(torch.float8_e4m3fn).float()
        rope_R = rows_W[..., at.rope : at.rope + 2 * rope].view(torch.bfloat16).float()
        scale_1 = rows_W[..., at.scale : at.scale + 4].view(torch.float32)
        return (torch.cat([latent_C, rope_R], dim=-1) * scale_1).to(dtype)


PLAIN, FP8 = PlainRows(), Fp8Rows()
LAYOUTS: dict[str, RowLayout] = {"auto": PLAIN, "fp8": FP8}


def of(cache: torch.Tensor) -> RowLayout:
    """The layout of a latent cache's rows."""
    return FP8 if cache.dtype == torch.uint8 else PLAIN


def row_scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 2^k and 2^-k for the least k with largest <= 448 * 2^k; of zeros and of what is next to them, the least.
    NaN, and its inverse no matter, where a latent is not finite: bytes alone may not tell.

    From the bits of float32, so that every device finds the same."""
    bits = largest.float().view(torch.int32)
    exponent = (((bits + _BEYOND_1_75) >> _MANTISSA_BITS) - _LARGEST_EXPONENT).clamp(min=1)
    inverse = 254 - exponent
    scale = (exponent << _MANTISSA_BITS).view(torch.float32).masked_fill(~largest.isfinite(), float("nan"))
    return scale, (inverse << _MANTISSA_BITS).view(torch.float32)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
