"""Dense bfloat16 products for few rows, at the speed of reading the weight.

The weight lies on the M side of the tensor cores' tile and the rows on its N side, so 1 row costs what 16 cost and a
row's bits do not depend on the others. Shape letters: T rows, O outputs, I inputs, P parts of a split sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl
from engine.kernels.gpu.device import architecture_memory, block_memory, num_processors

MAX_ROWS = 64
PROGRAMS_A_PROCESSOR = 1.7  # of 1, 1.7 and 2 the best at 1, 8 and 64 rows on an H200


@dataclass(frozen=True)
class Tile:
    """block_o outputs x block_i inputs a step, inputs split over `parts` programs, loads `stages` deep.

    The first `head` inputs of a part, a power of two, are one step of their own.
    """

    block_o: int = 64
    block_i: int = 128
    parts: int = 1
    stages: int = 4
    warps: int = 4
    head: int = 128


@triton.jit
def product(
    x_rows, w_rows, w_head, is_row,
    PART: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Float32 [BLOCK_O, ROWS] of PART inputs from where x_rows [ROWS, 1] and w_rows [BLOCK_O] point; w_head holds the
    weight's first columns, which are added last."""
    HEAD: tl.constexpr = w_head.shape[1]
    i = tl.arange(0, BLOCK_I)
    x_head = tl.load(x_rows + tl.arange(0, HEAD)[None, :], mask=is_row, other=0.0)
    acc = tl.zeros((BLOCK_O, ROWS), tl.float32)
    for step in tl.range(HEAD, PART, BLOCK_I, num_stages=STAGES):
        inside = (i < PART - step)[None, :]
        if (PART - HEAD) % BLOCK_I == 0:
            w = tl.load(w_rows[:, None] + step + i[None, :])
            x = tl.load(x_rows + step + i[None, :], mask=is_row, other=0.0)
        else:
            w = tl.load(w_rows[:, None] + step + i[None, :], mask=inside, other=0.0)
            x = tl.load(x_rows + step + i[None, :], mask=is_row & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    return tl.dot(w_head, tl.trans(x_head), acc)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    num_rows,
    OUT,
    X_STRIDE: tl.constexpr,
    IN: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[p, t, o] = sum over part p of the inputs of x[t, i] * w[o, i]."""
    part = tl.program_id(1)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    first = part * PART
    w_rows = w_ptr + tl.minimum(o, OUT - 1).to(tl.int64) * IN + first
    x_rows = x_ptr + t[:, None].to(tl.int64) * X_STRIDE + first
    is_row = (t < num_rows)[:, None]
    # The weight's first columns come before the input is there: the wait is time in which the memory can work.
    w_head = tl.load(w_rows[:, None] + tl.arange(0, HEAD)[None, :])
    pdl.wait(PDL)
    acc = product(x_rows, w_rows, w_head, is_row, PART, ROWS, BLOCK_O, BLOCK_I, STAGES)
    rows = (part * num_rows + t).to(tl.int64)
    out_ptrs = out_ptr + rows[:, None] * OUT + o[None, :]
    tl.store(out_ptrs, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=is_row & (o < OUT)[None, :])


def linear_parts(x_TI: torch.Tensor, weight_OI: torch.Tensor, tile: Tile, dtype=torch.float32) -> torch.Tensor:
    """Products over each of `tile.parts` ranges of the inputs, [P, T, O]; the caller adds them up in order.

    Rows of x may lie apart. Raises ValueError where a row's own numbers do.
    """
    num_rows, inputs = x_TI.shape
    if x_TI.stride(1) != 1:
        raise ValueError("the inputs of a row lie apart; make them contiguous before the product")
    outputs = weight_OI.shape[0]
    tile = fitted(tile, tile_rows(num_rows), block_memory(x_TI.device))
    out_PTO = torch.empty(tile.parts, num_rows, outputs, dtype=dtype, device=x_TI.device)
    rows = tile_rows(num_rows)
    grid = (triton.cdiv(outputs, tile.block_o), tile.parts, triton.cdiv(num_rows, rows))
    linear_kernel[grid](
        x_TI,
        weight_OI,
        out_PTO,
        num_rows,
        outputs,
        X_STRIDE=x_TI.stride(0) if num_rows > 1 else inputs,
        IN=inputs,
        PART=inputs // tile.parts,
        ROWS=rows,
        BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i,
        STAGES=tile.stages,
        HEAD=head_of(tile.head, inputs // tile.parts),
        num_warps=tile.warps,
        **pdl.launch_options(x_TI.device),
    )
    return out_PTO


def fitted(tile: Tile, rows: int, memory: int) -> Tile:
    """`tile` with as many stages as `memory` bytes of shared memory hold; none of that changes a bit of a result."""
    step_bytes, head_bytes = 2 * (tile.block_o + rows) * tile.block_i, 2 * (tile.block_o + rows) * tile.head
    return replace(tile, stages=max(1, min(tile.stages, (memory - head_bytes) // step_bytes)))


def tile_rows(num_rows: int) -> int:
    """Rows of one tile: padded to 16, which costs nothing while the weight is what is read."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def head_of(wanted: int, part: int) -> int:
    """The largest power of two that neither passes what is wanted nor the part."""
    return min(wanted, 1 << (part.bit_length() - 1))


def choose_tile(outputs: int, inputs: int, device: torch.device) -> Tile:
    """Splits the inputs until there are programs for every processor, in parts of at least four whole tiles.

    The number of rows plays no part: a row's sum must not depend on how many there are.
    """
    tile = Tile()
    wanted = int(PROGRAMS_A_PROCESSOR * num_processors(device))
    parts = 1
    while (
        2 * parts * triton.cdiv(outputs, tile.block_o) <= wanted
        and inputs % (2 * parts * tile.block_i) == 0
        and inputs // (2 * parts) >= 4 * tile.block_i
    ):
        parts *= 2
    return replace(tile, parts=parts)


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[T, O] for up to MAX_ROWS rows, in `dtype` or the weight's; the sum is not split, so one kernel is all."""
    return linear_parts(x_TI, weight_OI, Tile(), dtype or weight_OI.dtype)[0]


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of a whole and of a split product of K2.5's shares."""
    signature = {"x_ptr": "*bf16", "w_ptr": "*bf16", "out_ptr": "*bf16", "num_rows": "i32", "OUT": "i32"}
    cases = []
    for inputs, tile, rows, out in ((1024, Tile(), 16, "*bf16"), (7168, Tile(parts=4), 64, "*fp32")):
        tile = fitted(tile, rows, architecture_memory(capability))
        part = inputs // tile.parts
        constants = {
            "X_STRIDE": inputs, "IN": inputs, "PART": part, "ROWS": rows, "BLOCK_O": tile.block_o,
            "BLOCK_I": tile.block_i, "STAGES": tile.stages, "HEAD": head_of(tile.head, part),
            "PDL": capability >= (9, 0),
        }  # fmt: skip
        name = f"linear {inputs} in {tile.parts}, {rows} rows"
        cases.append((name, linear_kernel, signature | {"out_ptr": out}, constants, {"num_warps": tile.warps}))
    return cases
