"""Attention of a Llama-style draft: rotary embedding of halves, the cache of keys and values, one query a request.

`_attend` reads each tile of keys and values once for all query heads of their group and leaves one partial sum a split;
`_merge` adds the splits up in order by log-sum-exp. A split is a range of keys which follows from the length alone
(mla_merge.split_size), so that a request gives the same bits alone and in any batch. Keys lie on the M side of both
products (S^T = K q^T, O^T = V^T P^T).

Shape letters: T rows, N requests, B pages a request may hold, H query heads, G key heads, d width of a head, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.device import num_processors
from engine.kernels.gpu.mla_merge import split_size
from engine.kernels.gpu.pdl import launch_options, wait

MIN_SPLIT = 64  # keys
MAX_SPLITS = 64
TOKENS = 64  # keys a tile, at most
STAGES = 2  # tiles in flight; three would pass 99 KB of shared memory at the widest heads
PROGRAMS_A_PROCESSOR = 2
WARPS = 4
HEADS = 16  # a program that turns takes at most
COLUMNS = 1024  # a program that stores takes at most
LOG2_E = 1.4426950408889634
# One binary whatever the batch: its size, its tables' width and where they lie do not make another.
SPECIALIZATION = {
    "do_not_specialize": ["table_stride", "num_requests", "room", "num_splits"],
    "do_not_specialize_on_alignment": ["table_ptr", "lens_ptr"],
}


@triton.jit
def _rotate(
    x_ptr, angles_ptr, out_ptr, row_stride, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr
):
    """Program (t, h): HEADS heads of row t."""
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D // 2)
    places = head[:, None] * D + pair[None, :]
    here = (head < H)[:, None]
    wait(PDL)
    cos = tl.load(angles_ptr + row * D + 2 * pair)[None, :]
    sin = tl.load(angles_ptr + row * D + 2 * pair + 1)[None, :]
    x_row, out_row = x_ptr + row * row_stride + places, out_ptr + row * (H * D) + places
    first = tl.load(x_row, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x_row + D // 2, mask=here, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_row, (first * cos - second * sin).to(dtype), mask=here)
    tl.store(out_row + D // 2, (second * cos + first * sin).to(dtype), mask=here)


@triton.jit
def _store(
    k_ptr, v_ptr, slots_ptr, cache_ptr, k_stride, v_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, c): COLUMNS numbers of row t's keys and as many of its values."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < WIDTH
    wait(PDL)
    slot = cache_ptr + tl.load(slots_ptr + row) * (2 * WIDTH) + column
    tl.store(slot, tl.load(k_ptr + row * k_stride + column, mask=here, other=0.0), mask=here)
    tl.store(slot + WIDTH, tl.load(v_ptr + row * v_stride + column, mask=here, other=0.0), mask=here)


@triton.jit
def _tile(k_KD, v_KD, q_RD, acc_DR, top, denominator, visible, scale_log2):
    """One tile of keys: online softmax in powers of two."""
    scores = tl.where(visible, tl.dot(k_KD, tl.trans(q_RD)) * scale_log2, -1e30)
    new_top = tl.maximum(top, tl.max(scores, 0))
    probs = tl.exp2(scores - new_top[None, :])
    shrink = tl.exp2(top - new_top)
    denominator = denominator * shrink + tl.sum(probs, 0)
    acc_DR = tl.dot(tl.trans(v_KD), probs.to(v_KD.dtype), acc_DR * shrink[None, :])
    return acc_DR, new_top, denominator


@triton.jit(**SPECIALIZATION)
def _attend(
    q_ptr, cache_ptr, table_ptr, lens_ptr, partial_ptr, lse_ptr, table_stride, num_requests, room, num_splits,
    scale_log2,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, REQUESTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, g) takes splits p, p + programs, ... of all requests, for the query heads of key head g.

    room: keys that a table holds; num_splits: places a head's partial sums have."""
    wait(PDL)
    requests = tl.arange(0, REQUESTS)
    lens = tl.minimum(tl.load(lens_ptr + requests, mask=requests < num_requests, other=0), room)
    sizes = split_size(lens, MIN_SPLIT, MAX_SPLITS)
    units = (lens + sizes - 1) // sizes
    ends, total = tl.cumsum(units, 0), tl.sum(units, 0)
    group = tl.program_id(1)
    token, row, column = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, D)
    head = group * (H // G) + row
    real = row < H // G
    for unit in range(tl.program_id(0), total, tl.num_programs(0)):
        n = tl.sum((ends <= unit).to(tl.int32), 0)
        split = unit - tl.sum(tl.where(requests == n, ends - units, 0), 0)
        length = tl.minimum(tl.load(lens_ptr + n), room)
        size = split_size(length, MIN_SPLIT, MAX_SPLITS)
        places = n.to(tl.int64) * H + head
        q_RD = tl.load(q_ptr + places[:, None] * D + column[None, :], mask=real[:, None], other=0.0)
        table_row = table_ptr + n.to(tl.int64) * table_stride
        top = tl.full([ROWS], -1e30, tl.float32)
        denominator = tl.zeros([ROWS], tl.float32)
        acc_DR = tl.zeros([D, ROWS], tl.float32)
        for t in tl.range(split * size, tl.minimum(length, (split + 1) * size), TOKENS, num_stages=STAGES):
            page = tl.load(table_row + t // PAGE).to(tl.int64)
            slots = page * PAGE + t % PAGE + token
            keys = cache_ptr + slots * (2 * G * D) + group * D
            written = (t + token < length)[:, None]
            k_KD = tl.load(keys[:, None] + column[None, :], mask=written, other=0.0)
            v_KD = tl.load(keys[:, None] + G * D + column[None, :], mask=written, other=0.0)
            acc_DR, top, denominator = _tile(k_KD, v_KD, q_RD, acc_DR, top, denominator, written, scale_log2)
        at = places * num_splits + split
        sums = partial_ptr + at[:, None] * D + column[None, :]
        tl.store(sums, tl.trans(acc_DR / denominator[None, :]), mask=real[:, None])
        tl.store(lse_ptr + at, top + tl.log2(denominator), mask=real)


@triton.jit(**SPECIALIZATION)
def _merge(
    partial_ptr, lse_ptr, lens_ptr, out_ptr, room, num_splits,
    H: tl.constexpr, D: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program r: head r of all requests' heads. The kernel just before wrote no lengths."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lens_ptr + row // H), room)
    size = split_size(length, MIN_SPLIT, MAX_SPLITS)
    split, column = tl.arange(0, MAX_SPLITS), tl.arange(0, D)
    here = split < (length + size - 1) // size
    places = row * num_splits + split
    wait(PDL)
    lse = tl.load(lse_ptr + places, mask=here, other=-1e30)
    parts = tl.load(partial_ptr + places[:, None] * D + column[None, :], mask=here[:, None], other=0.0)
    weights = tl.where(here, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1e-30)
    tl.store(out_ptr + row * D + column, merged.to(out_ptr.dtype.element_ty))


def rotate_halves(x_THd: torch.Tensor, angles_Td: torch.Tensor) -> torch.Tensor:
    """Turns pairs (i, i + d / 2) of each head, in float32; a new tensor like x. angles_Td: (cos, sin) of each pair.

    Rows of x may lie apart, the heads of a row may not."""
    rows, heads, width = x_THd.shape
    _check_width(width)
    out_THd = torch.empty(rows, heads, width, dtype=x_THd.dtype, device=x_THd.device)
    block = min(HEADS, triton.next_power_of_2(heads))
    _rotate[(rows, triton.cdiv(heads, block))](
        x_THd, angles_Td, out_THd, _row_stride(x_THd), H=heads, D=width, HEADS=block, **launch_options(x_THd.device)
    )
    return out_THd


def store_heads(cache: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Writes keys and values of G heads to their slots of the contiguous cache [blocks, page, 2 x G x d], keys first.

    Rows of keys and values may lie apart, the heads of a row may not. Raises ValueError for a cache of other rows."""
    rows, groups, width = k_TGd.shape
    if cache.shape[-1] != 2 * groups * width or not cache.is_contiguous():
        raise ValueError(
            f"a cache row holds {cache.shape[-1]} numbers; {2 * groups * width} contiguous ones are needed"
        )
    block = min(COLUMNS, triton.next_power_of_2(groups * width))
    _store[(rows, triton.cdiv(groups * width, block))](
        k_TGd, v_TGd, slots_T, cache, _row_stride(k_TGd), _row_stride(v_TGd), WIDTH=groups * width, COLUMNS=block,
        **launch_options(cache.device),
    )  # fmt: skip


def attend_heads(
    q_NHd: torch.Tensor,
    cache: torch.Tensor,
    table_NB: torch.Tensor,
    seq_lens_N: torch.Tensor,
    scale: float,
    max_splits: int = MAX_SPLITS,
) -> torch.Tensor:
    """One query a request over its first seq_lens_N keys; [N, H, d] like q, zeros where the length is 0.

    q_NHd contiguous, d 32, 64 or 128, H a multiple of G; cache contiguous [blocks, page, 2 x G x d], keys first; the
    page a power of two, 16 or more; table_NB integers; seq_lens_N int32, keys beyond the table are not there.
    max_splits: a power of two, which changes results in the last bits. Raises ValueError for other shapes.
    """
    requests, heads, width = q_NHd.shape
    page, groups = cache.shape[1], cache.shape[2] // (2 * width)
    _check_width(width)
    if cache.shape[2] != 2 * groups * width or heads % groups or not (cache.is_contiguous() and q_NHd.is_contiguous()):
        raise ValueError("queries and cache must be contiguous, with query heads a multiple of the cache's key heads")
    room = table_NB.shape[1] * page
    num_splits = min(max_splits, triton.cdiv(room, MIN_SPLIT))
    device, options = q_NHd.device, launch_options(q_NHd.device)
    partial_NHSd = torch.empty(requests, heads, num_splits, width, dtype=torch.float32, device=device)
    lse_NHS = torch.empty(requests, heads, num_splits, dtype=torch.float32, device=device)
    out_NHd = torch.empty(requests, heads, width, dtype=q_NHd.dtype, device=device)
    splits = {"MIN_SPLIT": MIN_SPLIT, "MAX_SPLITS": max_splits}
    programs = max(1, PROGRAMS_A_PROCESSOR * num_processors(device) // groups)
    _attend[min(requests * num_splits, programs), groups](
        q_NHd, cache, table_NB, seq_lens_N, partial_NHSd, lse_NHS, table_NB.stride(0), requests, room, num_splits,
        scale * LOG2_E, H=heads, G=groups, D=width, PAGE=page, ROWS=max(16, triton.next_power_of_2(heads // groups)),
        TOKENS=min(TOKENS, page), STAGES=STAGES, REQUESTS=max(32, triton.next_power_of_2(requests)), **splits,
        num_warps=WARPS, **options,
    )  # fmt: skip
    _merge[requests * heads,](
        partial_NHSd, lse_NHS, seq_lens_N, out_NHd, room, num_splits, H=heads, D=width, **splits, num_warps=WARPS,
        **options,
    )  # fmt: skip
    return out_NHd


def _check_width(width: int) -> None:
    if width not in (32, 64, 128):
        raise ValueError(f"heads of width {width} have no kernel, only 32, 64 and 128; use the reference kernels.")


def _row_stride(x_THd: torch.Tensor) -> int:
    """Numbers from row to row. Raises ValueError unless a row's heads are contiguous."""
    if x_THd.stride(2) != 1 or (x_THd.shape[1] > 1 and x_THd.stride(1) != x_THd.shape[2]):
        raise ValueError("the heads of a row lie apart; make them contiguous before the call")
    return x_THd.stride(0)


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the tiny draft's heads and of a rank of 8 at full size."""
    pdl, warps = {"PDL": capability >= (9, 0)}, {"num_warps": WARPS}
    names = ("x_ptr", "out_ptr", "k_ptr", "v_ptr", "cache_ptr", "q_ptr")
    kinds = dict.fromkeys(names, "*bf16") | dict.fromkeys(("angles_ptr", "partial_ptr", "lse_ptr"), "*fp32")
    kinds |= {"slots_ptr": "*i64", "table_ptr": "*i64", "lens_ptr": "*i32", "scale_log2": "fp32"}
    kinds |= dict.fromkeys(("row_stride", "k_stride", "v_stride", *SPECIALIZATION["do_not_specialize"]), "i32")
    splits = {"MIN_SPLIT": MIN_SPLIT, "MAX_SPLITS": MAX_SPLITS} | pdl
    tile = {"PAGE": 64, "ROWS": 16, "TOKENS": TOKENS, "STAGES": STAGES, "REQUESTS": 64} | splits
    cases = []
    for heads, groups, width in ((8, 2, 32), (8, 8, 64), (8, 1, 128), (8, 8, 128)):
        name, shape = f"{heads} heads on {groups} of {width}", {"H": heads, "D": width}
        block = min(COLUMNS, triton.next_power_of_2(groups * width))
        cases += [
            (f"rotate {name}", _rotate, kinds, shape | {"HEADS": heads} | pdl, {}),
            (f"store {name}", _store, kinds, {"WIDTH": groups * width, "COLUMNS": block} | pdl, {}),
            (f"attend {name}", _attend, kinds, shape | {"G": groups} | tile, warps),
            (f"merge {name}", _merge, kinds, shape | splits, warps),
        ]
    return cases
