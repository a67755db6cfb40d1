"""Writes rows of the latent cache; twin: `reference.store_latent`.

Shape letters: T tokens, X width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.pdl import launch_options, start, wait


@triton.jit
def _store(
    rows_ptr, slots_ptr, num_tokens_ptr, cache_ptr, row_stride, X: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program t copies row t unless it is padding."""
    start(PDL)
    wait(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    mask = (columns < X) & (row < tl.load(num_tokens_ptr))
    slot = tl.load(slots_ptr + row).to(tl.int64)
    values = tl.load(rows_ptr + row.to(tl.int64) * row_stride + columns, mask=mask)
    tl.store(cache_ptr + slot * X + columns, values, mask=mask)


def store_latent(
    cache: torch.Tensor, latent_TX: torch.Tensor, slots_T: torch.Tensor, num_tokens_1: torch.Tensor
) -> None:
    """cache: [blocks, block_size, X], contiguous; rows from num_tokens_1 on go nowhere, whatever their slots."""
    width = cache.shape[-1]
    _store[(latent_TX.shape[0],)](
        latent_TX, slots_T, num_tokens_1, cache, latent_TX.stride(0), X=width, COLUMNS=triton.next_power_of_2(width),
        num_warps=1, **launch_options(cache.device),
    )  # fmt: skip


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the shapes in use."""
    signature = {
        "rows_ptr": "*bf16", "slots_ptr": "*i64", "num_tokens_ptr": "*i32", "cache_ptr": "*bf16", "row_stride": "i32",
    }  # fmt: skip
    return [
        ("store", _store, signature, {"X": 576, "COLUMNS": 1024, "PDL": capability >= (9, 0)}, {"num_warps": 1}),
    ]
