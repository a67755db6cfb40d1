"""What a step starts with: token embeddings and rotary angles. Shape letters: T tokens, D model width, R rope width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl


@triton.jit
def embed_kernel(ids_ptr, weight_ptr, out_ptr, first, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    pdl.wait(PDL)
    row = tl.load(ids_ptr + token) - first
    here = (row >= 0) & (row < rows) & (d < D)
    tl.store(out_ptr + token * D + d, tl.load(weight_ptr + row * D + d, mask=here, other=0.0), mask=d < D)


@triton.jit
def angles_kernel(positions_ptr, frequencies_ptr, out_ptr, magnitude, R: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, R // 2)
    frequency = tl.load(frequencies_ptr + pair)
    pdl.wait(PDL)
    angle = tl.load(positions_ptr + token).to(tl.float32) * frequency
    tl.store(out_ptr + token * R + 2 * pair, tl.cos(angle) * magnitude)
    tl.store(out_ptr + token * R + 2 * pair + 1, tl.sin(angle) * magnitude)


def embed(token_ids_T: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """Rows token - first of `weight`, [T, D]; zeros for tokens whose row is not here."""
    num_tokens, width = token_ids_T.shape[0], weight.shape[1]
    out_TD = torch.empty(num_tokens, width, dtype=weight.dtype, device=weight.device)
    embed_kernel[(num_tokens, triton.cdiv(width, 1024))](
        token_ids_T, weight, out_TD, first, weight.shape[0], D=width, BLOCK_D=1024, **pdl.launch_options(weight.device)
    )
    return out_TD


def rope_angles(positions_T: torch.Tensor, frequencies: torch.Tensor, magnitude: float) -> torch.Tensor:
    """complex64 [T, R / 2]: magnitude * exp(i * position * frequency), angles in float32."""
    num_tokens, pairs = positions_T.shape[0], frequencies.shape[0]
    out_TR = torch.empty(num_tokens, pairs, 2, dtype=torch.float32, device=frequencies.device)
    angles_kernel[(num_tokens,)](
        positions_T,
        frequencies,
        out_TR,
        magnitude,
        R=2 * pairs,
        num_warps=1,
        **pdl.launch_options(frequencies.device),
    )
    return torch.view_as_complex(out_TR)


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of K2.5's widths."""
    pdl_on = {"PDL": capability >= (9, 0)}
    ids = {"ids_ptr": "*i64", "weight_ptr": "*bf16", "out_ptr": "*bf16", "first": "i32", "rows": "i32"}
    angles = {"positions_ptr": "*i64", "frequencies_ptr": "*fp32", "out_ptr": "*fp32", "magnitude": "fp32"}
    return [
        ("embed", embed_kernel, ids, {"D": 7168, "BLOCK_D": 1024} | pdl_on, {"num_warps": 4}),
        ("angles", angles_kernel, angles, {"R": 64} | pdl_on, {"num_warps": 1}),
    ]
