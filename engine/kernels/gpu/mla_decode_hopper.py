"""The attention half of `mla_decode` for compute capability 9.0, in Gluon: same units, same sums, tiles in a ring.

What Triton's own pipeliner does not give: two or three tiles of a page fill shared memory, so the next load must start
as soon as a tile is used up, and go on over the borders of units, while the sums of a unit are written out. Sums go out
straight from registers: what room a transposition would take is the third tile's.

Rows of bytes (kv_rows) come into the ring as they are. Each tile is widened to bfloat16 in room of its own, which frees
its slot before the sums; a row's scale multiplies its scores and weights.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.gpu.mla_widen import barrier, widen_and_score
from engine.kernels.gpu.pdl import wait

TOKENS = 64
# One binary whatever the batch: its size, its tables' width and where they lie do not make another.
SPECIALIZATION = {
    "do_not_specialize": ["table_stride", "num_requests", "num_tokens"],
    "do_not_specialize_on_alignment": ["table_ptr", "starts_ptr", "lens_ptr"],
}
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
BYTES_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
SCALE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
SCALE_COLUMNS = 4  # 16 bytes, the fewest that a load takes; the scale is the first of them


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _split_size(length, MIN_SPLIT: gl.constexpr, MAX_SPLITS: gl.constexpr):
    """As in mla_decode."""
    return gl.maximum((length + (MAX_SPLITS * 64 - 1)) // (MAX_SPLITS * 64) * 64, MIN_SPLIT)


@gluon.jit
def _describe(unit, ends, units, lens, first_rows, query_lens, requests, MIN_SPLIT: gl.constexpr, MAX: gl.constexpr):
    """(request, its first row, query tokens, length, split, split's size, end of its keys) of a unit."""
    n = gl.sum((ends <= unit).to(gl.int32), 0)
    mine = requests == n
    split = unit - gl.sum(gl.where(mine, ends - units, 0), 0)
    first_row = gl.sum(gl.where(mine, first_rows, 0), 0)
    query_len = gl.sum(gl.where(mine, query_lens, 0), 0)
    seq_len = gl.sum(gl.where(mine, lens, 0), 0)
    size = _split_size(seq_len, MIN_SPLIT, MAX)
    num_splits = (seq_len + size - 1) // size
    smaller = split >= num_splits  # of the rows whose shorter view has smaller splits
    first_size = _split_size(seq_len - query_len + 1, MIN_SPLIT, MAX)
    stop = gl.where(smaller, first_size * MAX, seq_len)
    split = gl.where(smaller, split - num_splits, split)
    size = gl.where(smaller, first_size, size)
    return n, first_row, query_len, seq_len, split, size, gl.minimum(stop, (split + 1) * size)


@gluon.jit
def _issue(
    latent_desc, rope_desc, scale_desc, row, latent_ring, rope_ring, scale_ring, bars, k, C: gl.constexpr,
    R: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the loads of a tile into slot k of the ring. Columns count elements of their parts' types."""
    bar = bars.index(k % STAGES)
    if BYTES:
        mbarrier.expect(bar, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes + scale_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(latent_desc, [row, 0], bar, latent_ring.index(k % STAGES))
        tma.async_copy_global_to_shared(rope_desc, [row, C // 2], bar, rope_ring.index(k % STAGES))
        tma.async_copy_global_to_shared(scale_desc, [row, (C + 2 * R) // 4], bar, scale_ring.index(k % STAGES))
    else:
        mbarrier.expect(bar, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(latent_desc, [row, 0], bar, latent_ring.index(k % STAGES))
        tma.async_copy_global_to_shared(rope_desc, [row, C], bar, rope_ring.index(k % STAGES))


@gluon.jit
def _clear(latent, num_rows, C: gl.constexpr):
    """Zeros in the rows of a tile that nothing wrote: they may hold NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    unwritten = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) >= num_rows
    for i in gl.static_range(C // 64):
        panel = latent.slice(i * 64, 64, dim=1)
        values = panel.load(layout)
        panel.store(gl.where(gl.expand_dims(unwritten, 1), gl.zeros_like(values), values))
    fence_async_shared()
    barrier()


@gluon.jit
def _issue_q(latent_desc, rope_desc, row, q_latent, q_rope, bar, C: gl.constexpr):
    """Starts the load of a unit's queries; rows past its own are the next token's or zeros, and come to nothing."""
    mbarrier.expect(bar, latent_desc.block_type.nbytes + rope_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(latent_desc, [row, 0], bar, q_latent)
    tma.async_copy_global_to_shared(rope_desc, [row, C], bar, q_rope)


@gluon.jit
def _advance(
    go, ahead, token, stop, table, new_from, page, table_ptr, table_stride, total, ends, units, lens, first_rows,
    query_lens, requests, MIN_SPLIT: gl.constexpr, MAX_SPLITS: gl.constexpr,
):  # fmt: skip
    """Moves the cursor of the loads, where `go`, to the next tile, in this unit or at the start of the next.

    Without branches, as it runs beside the tensor cores."""
    token = gl.where(go, token + 64, token)
    ends_unit = token >= stop
    ahead = gl.where(ends_unit, ahead + gl.num_programs(0), ahead)
    n, _row, query_len, seq_len, split, size, next_stop = _describe(
        ahead, ends, units, lens, first_rows, query_lens, requests, MIN_SPLIT, MAX_SPLITS
    )
    token = gl.where(ends_unit, split * size, token)
    stop = gl.where(ends_unit, next_stop, stop)
    table = gl.where(ends_unit, n.to(gl.int64) * table_stride, table)
    new_from = gl.where(ends_unit, seq_len - query_len, new_from)
    page = gl.load(table_ptr + table + token // 64, mask=ahead < total, other=0).to(gl.int32)
    return ahead, token, stop, table, new_from, page


@gluon.jit(**SPECIALIZATION)
def _attend(
    q_latent_desc,
    q_rope_desc,
    latent_desc,
    rope_desc,
    scale_desc,
    table_ptr,
    starts_ptr,
    lens_ptr,
    partial_ptr,
    lse_ptr,
    table_stride,
    num_requests,
    scale_log2,
    H: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BYTES: gl.constexpr,
    MIN_SPLIT: gl.constexpr,
    MAX_SPLITS: gl.constexpr,
    REQUESTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (p, r) takes units p, p + programs, ... of all requests' splits and rows r * ROWS... of their queries.

    Lengths, tables and keys of earlier steps are read before the previous kernel ends: it may write none of them. A
    second group of four warps takes half the rows of the scores and half the columns of the sums."""
    groups: gl.constexpr = gl.num_warps() // 4
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, groups], [16, ROWS // groups, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, mma)
    sum_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * groups, 1], [16, ROWS, 16])
    sum_row_layout: gl.constexpr = gl.SliceLayout(0, sum_mma)
    each: gl.constexpr = gl.BlockedLayout([REQUESTS // 32], [32], [4 * groups], [0])
    probs_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = q_latent_desc.dtype
    latent_ring = gl.allocate_shared_memory(latent_desc.dtype, [STAGES, 64, C], latent_desc.layout)
    scale_ring = None
    if BYTES:
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 64, 4], scale_desc.layout)
        wide = gl.allocate_shared_memory(dtype, [64, C], q_latent_desc.layout)
    rope_ring = gl.allocate_shared_memory(dtype, [STAGES, 64, R], rope_desc.layout)
    q_latent = gl.allocate_shared_memory(dtype, [ROWS, C], q_latent_desc.layout)
    q_rope = gl.allocate_shared_memory(dtype, [ROWS, R], q_rope_desc.layout)
    probs_tile = gl.allocate_shared_memory(dtype, [ROWS, 64], probs_layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    mbarrier.init(q_bar, count=1)

    requests = gl.arange(0, REQUESTS, layout=each)
    known = requests < num_requests
    lens = gl.load(lens_ptr + requests, mask=known, other=0)
    first_rows = gl.load(starts_ptr + requests, mask=known, other=0)
    query_lens = gl.load(starts_ptr + requests + 1, mask=known, other=0) - first_rows
    size_of = _split_size(lens, MIN_SPLIT, MAX_SPLITS)
    smaller = _split_size(lens - query_lens + 1, MIN_SPLIT, MAX_SPLITS) < size_of
    units = (lens + size_of - 1) // size_of + gl.where(smaller, MAX_SPLITS, 0)
    units = gl.where((lens > 0) & (query_lens > 0), units, 0)
    ends = gl.associative_scan(units, 0, _add)
    total = gl.sum(units, 0)

    unit = gl.program_id(0)
    n, first_row, query_len, seq_len, split, size, stop = _describe(
        unit, ends, units, lens, first_rows, query_lens, requests, MIN_SPLIT, MAX_SPLITS
    )
    # The cursor of the loads runs ahead of the sums by the tiles of the ring.
    ahead = unit
    ahead_token = split * size
    ahead_stop = stop
    ahead_table = n.to(gl.int64) * table_stride
    new_from = seq_len - query_len
    page = gl.load(table_ptr + ahead_table + ahead_token // 64, mask=ahead < total, other=0).to(gl.int32)
    issued = 0
    while (issued < STAGES) & (ahead < total) & (ahead_token + 64 <= new_from):
        _issue(
            latent_desc, rope_desc, scale_desc, page * 64, latent_ring, rope_ring, scale_ring, bars, issued, C, R,
            BYTES, STAGES,
        )  # fmt: skip
        issued += 1
        ahead, ahead_token, ahead_stop, ahead_table, new_from, page = _advance(
            True, ahead, ahead_token, ahead_stop, ahead_table, new_from, page, table_ptr, table_stride, total, ends,
            units, lens, first_rows, query_lens, requests, MIN_SPLIT, MAX_SPLITS,
        )  # fmt: skip
    wait(PDL)
    first_of_tile = gl.program_id(1) * ROWS
    if unit < total:
        _issue_q(q_latent_desc, q_rope_desc, first_row * H + first_of_tile, q_latent, q_rope, q_bar, C)
    while (issued < STAGES) & (ahead < total):
        _issue(
            latent_desc, rope_desc, scale_desc, page * 64, latent_ring, rope_ring, scale_ring, bars, issued, C, R,
            BYTES, STAGES,
        )  # fmt: skip
        issued += 1
        ahead, ahead_token, ahead_stop, ahead_table, new_from, page = _advance(
            True, ahead, ahead_token, ahead_stop, ahead_table, new_from, page, table_ptr, table_stride, total, ends,
            units, lens, first_rows, query_lens, requests, MIN_SPLIT, MAX_SPLITS,
        )  # fmt: skip
    used = 0
    q_phase = 0
    rows = first_of_tile + gl.arange(0, ROWS, layout=row_layout)
    keys = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    sum_rows = first_of_tile + gl.arange(0, ROWS, layout=sum_row_layout)
    columns = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, sum_mma)), 1)
    while unit < total:
        row_lens = gl.where(rows < query_len * H, seq_len - query_len + 1 + rows // H, 0)
        top = gl.full([ROWS], -1e30, gl.float32, layout=row_layout)
        sums = gl.zeros([64, ROWS], gl.float32, layout=mma)
        acc = gl.zeros([C, ROWS], gl.float32, layout=sum_mma)
        token = split * size
        mbarrier.wait(q_bar, q_phase)
        while token < stop:
            latent = latent_ring.index(used % STAGES)
            rope = rope_ring.index(used % STAGES)
            mbarrier.wait(bars.index(used % STAGES), (used // STAGES) & 1)
            scores = gl.zeros([64, ROWS], gl.float32, layout=mma)
            if BYTES:
                scores = widen_and_score(latent, wide, rope, q_latent, q_rope, scores, C)
                latent = wide
                scale_K1 = scale_ring.index(used % STAGES).slice(0, 1, dim=1).load(mma)
                scale_K1 = gl.where(gl.expand_dims(token + keys, 1) < seq_len, scale_K1, 0.0)
            else:
                if token + 64 > seq_len:
                    _clear(latent, seq_len - token, C)
                scores = warpgroup_mma(latent, q_latent.permute((1, 0)), scores, use_acc=False, is_async=True)
                scores = warpgroup_mma(rope, q_rope.permute((1, 0)), scores, is_async=True)
            # A tile was issued at the end of the last turn; the first turn found the cursor already moved.
            ahead, ahead_token, ahead_stop, ahead_table, new_from, page = _advance(
                used > 0, ahead, ahead_token, ahead_stop, ahead_table, new_from, page, table_ptr, table_stride, total,
                ends, units, lens, first_rows, query_lens, requests, MIN_SPLIT, MAX_SPLITS,
            )  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=(scores,))
            if BYTES and token + 64 > seq_len:  # scores of rows that nothing wrote are masked
                _clear(latent, seq_len - token, C)
            visible = gl.expand_dims(token + keys, 1) < gl.expand_dims(row_lens, 0)
            if BYTES:
                scores = scores * scale_K1
            scores = gl.where(visible, scores * scale_log2, -1e30)
            new_top = gl.maximum(top, gl.max(scores, 0))
            probs = gl.exp2(scores - gl.expand_dims(new_top, 0))
            shrink = gl.exp2(top - new_top)
            top = new_top
            sums = sums * gl.expand_dims(shrink, 0) + probs
            if BYTES:
                probs = probs * scale_K1
            probs_tile.permute((1, 0)).store(probs.to(dtype))
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, sum_row_layout), 0)
            fence_async_shared()
            barrier()
            if (token + 64 >= stop) & (unit + gl.num_programs(0) < total):  # no warp needs these queries any more
                next_n = gl.sum((ends <= unit + gl.num_programs(0)).to(gl.int32), 0)
                next_row = gl.sum(gl.where(requests == next_n, first_rows, 0), 0)
                _issue_q(q_latent_desc, q_rope_desc, next_row * H + first_of_tile, q_latent, q_rope, q_bar, C)
            if BYTES and ahead < total:  # the slot has been free since its tile was widened and scored
                _issue(
                    latent_desc, rope_desc, scale_desc, page * 64, latent_ring, rope_ring, scale_ring, bars, used, C, R,
                    BYTES, STAGES,
                )  # fmt: skip
            acc = warpgroup_mma(latent.permute((1, 0)), probs_tile.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            barrier()
            if not BYTES and ahead < total:  # the slot is free: its next tile starts at once, before a unit's end
                _issue(
                    latent_desc, rope_desc, scale_desc, page * 64, latent_ring, rope_ring, scale_ring, bars, used, C, R,
                    BYTES, STAGES,
                )  # fmt: skip
            used += 1
            token += 64
        place = first_row.to(gl.int64) * H
        wanted = (row_lens > split * size) & (_split_size(row_lens, MIN_SPLIT, MAX_SPLITS) == size)
        sum_lens = gl.where(sum_rows < query_len * H, seq_len - query_len + 1 + sum_rows // H, 0)
        sum_wanted = (sum_lens > split * size) & (_split_size(sum_lens, MIN_SPLIT, MAX_SPLITS) == size)
        lse_at = lse_ptr + (place + rows) * MAX_SPLITS + split
        at = partial_ptr + gl.expand_dims(((place + sum_rows) * MAX_SPLITS + split) * C, 0)
        unit += gl.num_programs(0)
        n, first_row, query_len, seq_len, split, size, stop = _describe(
            unit, ends, units, lens, first_rows, query_lens, requests, MIN_SPLIT, MAX_SPLITS
        )
        q_phase = q_phase ^ 1
        denominator = gl.sum(sums, 0)
        gl.store(lse_at, top + gl.log2(denominator), mask=wanted)
        factor = gl.convert_layout(1.0 / denominator, sum_row_layout)
        out = (acc * gl.expand_dims(factor, 0)).to(partial_ptr.dtype.element_ty)
        gl.store(at + columns, out, mask=gl.expand_dims(sum_wanted, 0))


def _resources(rows: int, in_bytes: bool) -> tuple[int, int]:
    """(tiles in flight, warps): what shared memory and registers leave room for."""
    if in_bytes:
        return (3 if rows <= 16 else 2), (8 if rows >= 16 else 4)
    return (3 if rows <= 8 else 2), (8 if rows >= 32 else 4)


def launch(
    grid: tuple[int, int], q_THX: torch.Tensor, cache: torch.Tensor, arguments: tuple, constants: dict, options: dict
) -> None:
    """Launches on `arguments` from block_table_NB to the scale, as mla_decode passes them to its own kernel."""
    in_bytes, rows_LW = cache.dtype == torch.uint8, cache.flatten(0, 1)
    views = [rows_LW, rows_LW, None]
    if in_bytes:
        views = [rows_LW.view(dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32)]
    sources = [q_THX.flatten(0, 1)] * 2 + views
    tiles = _tiles(constants, in_bytes)
    described = [
        view if view is None else TensorDescriptor.from_tensor(view, *tile)
        for view, tile in zip(sources, tiles, strict=True)
    ]
    stages, warps = _resources(constants["ROWS"], in_bytes)
    _attend[grid](
        *described, *arguments, **constants | {"STAGES": stages, "BYTES": in_bytes}, **options, num_warps=warps
    )


def _tiles(constants: dict, in_bytes: bool) -> list[tuple]:
    """(shape, layout) of a tile of queries, of their roped part, of latents, roped keys and scales."""
    queries = [([constants["ROWS"], constants[width]], TILE_LAYOUT) for width in ("C", "R")]
    latents = ([TOKENS, constants["C"]], BYTES_LAYOUT if in_bytes else TILE_LAYOUT)
    return [*queries, latents, ([TOKENS, constants["R"]], TILE_LAYOUT), ([TOKENS, SCALE_COLUMNS], SCALE_LAYOUT)]


def compile_case(name: str, signature: dict, constants: dict, in_bytes: bool) -> tuple:
    """One entry of mla_decode.compile_cases; the kernel's own source class is Gluon's."""
    kinds = {"q_latent_desc": "bf16", "q_rope_desc": "bf16", "latent_desc": "fp8e4nv" if in_bytes else "bf16"}
    kinds |= {"rope_desc": "bf16", "scale_desc": "fp32"}
    sources = {
        argument: f"tensordesc<{kind}[{shape[0]},{shape[1]}],{layout!r}>"
        for (argument, kind), (shape, layout) in zip(kinds.items(), _tiles(constants, in_bytes), strict=True)
    }
    stages, warps = _resources(constants["ROWS"], in_bytes)
    constants = constants | {"STAGES": stages, "BYTES": in_bytes}
    if not in_bytes:
        del sources["scale_desc"]
        constants["scale_desc"] = None
    signature = {key: value for key, value in signature.items() if key != "q_ptr"}
    return name, _attend, signature | sources, constants, {"num_warps": warps}
