"""Sum over ranks, residual and RMSNorm in one kernel, which also carries the rows: once straight to everyone, or by way
of each row's owner.

Shape letters: T rows, t rows of this rank, D width, S parts of this rank's sum, P ranks, V ranks of a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu import pdl, peer
from engine.kernels.gpu.peer import GATHER, NORM, PUSH, SETS, SUM


@triton.jit(do_not_specialize=["num_rows", "first_rank", "limit_ns"])
def one_shot_kernel(
    partial_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, squares_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, PHASES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Every rank sends its row to every rank, and all of them add the P rows up.

    A rank's memory: rows [SETS, P senders, CAPACITY, D]. Program (i, v) works on the chunks i, i + grid, ... of all
    rows for rank first_rank + v.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    whole = v * num_rows * D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = (
        peers_ptr + v * P,
        state_ptr + v * 2 * MOST,
        failed_ptr + v,
        alarm_ptr + v * P,
    )
    squares_ptr += v * CAPACITY * WIDE
    column = tl.arange(0, BLOCK)
    num_items, stride = num_rows * CHUNKS, CAPACITY * D
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    place = peer.set_of(calls) * P * stride
    mine = peer.address(peers_ptr, rank, dtype)
    if PUSH & PHASES:
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            total = peer.own_sum(partial_ptr + whole * PARTS, row, num_rows, d, d < D, D, PARTS)
            peer.send_to_all(peers_ptr, place + rank * stride + row * D + d, total, d < D, P, dtype)
        before = peer.set_of(calls + SETS - 1) * P * stride
        for item in range(tl.program_id(0), rows_before * CHUNKS, tl.num_programs(0)):
            d = item % CHUNKS * BLOCK + column
            peer.put_marks(mine + before, stride, peer.wide(item // CHUNKS), d, d < D, P, D, dtype)
    if SUM & PHASES:
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            rows = peer.wait_rows(
                mine + place + row * D, stride, d, d < D, -1, failed_ptr, alarm_ptr, limit_ns, P, dtype, ASM
            )
            total = peer.add_in_order(rows, P, dtype)
            new = peer.add_residual(total, residual_ptr, new_residual_ptr, whole + row * D + d, d < D, dtype)
            peer.tell_squares(squares_ptr, row, item % CHUNKS, new, calls, WIDE)
    if NORM & PHASES:
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            new = tl.load(new_residual_ptr + whole + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
            squares = peer.wait_squares(squares_ptr, row, calls, CHUNKS, WIDE)
            tl.store(out_ptr + whole + row * D + d, peer.normed(new, squares, weight, eps, D), mask=d < D)
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)


@triton.jit(do_not_specialize=["num_rows", "share", "first_rank", "limit_ns"])
def two_shot_kernel(
    partial_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, squares_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, share, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, LOCAL: tl.constexpr, PHASES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every row goes to its owner, who adds, norms, and sends the result to everyone; or keeps it, if LOCAL.

    Rank r owns rows [r * share, (r + 1) * share) and their residuals. A rank's memory: arriving parts [SETS, P senders,
    CAPACITY / P, D], results [SETS, CAPACITY, D], the senders' counts of calls.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    whole, own = v * num_rows * D, v * share * D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = (
        peers_ptr + v * P,
        state_ptr + v * 2 * MOST,
        failed_ptr + v,
        alarm_ptr + v * P,
    )
    squares_ptr += v * CAPACITY * WIDE
    column = tl.arange(0, BLOCK)
    stride = (CAPACITY // P) * D
    program, grid = tl.program_id(0), tl.num_programs(0)
    num_items = num_rows * CHUNKS
    first = rank * share
    num_own = tl.minimum(tl.maximum(num_rows - first, 0), share) * CHUNKS
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    parts = peer.set_of(calls) * P * stride
    results = SETS * P * stride + peer.set_of(calls) * CAPACITY * D
    mine = peer.address(peers_ptr, rank, dtype)
    if PUSH & PHASES:
        if LOCAL:
            credits: tl.constexpr = SETS * 2 * CAPACITY * D * dtype.primitive_bitwidth // 8
            peer.wait_for_room(peers_ptr, rank, credits, calls, failed_ptr, alarm_ptr, limit_ns, P, ASM)
        for item in range(program, num_items, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            total = peer.own_sum(partial_ptr + whole * PARTS, row, num_rows, d, d < D, D, PARTS)
            owner = row // share
            theirs = peer.address(peers_ptr, owner, dtype)
            place = parts + rank * stride + (row - owner * share) * D
            tl.store(theirs + place + d, peer.to_bits(total, dtype), mask=d < D)
        old_parts = peer.set_of(calls + SETS - 1) * P * stride
        old_results = SETS * P * stride + peer.set_of(calls + SETS - 1) * CAPACITY * D
        share_before = (rows_before + P - 1) // P
        for item in range(program, rows_before * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            if not LOCAL:
                peer.put_marks(mine + old_results, 0, row, d, d < D, 1, D, dtype)
            if row < share_before:
                peer.put_marks(mine + old_parts, stride, row, d, d < D, P, D, dtype)
    if SUM & PHASES:
        for item in range(program, num_own, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            rows = peer.wait_rows(
                mine + parts + row * D, stride, d, d < D, -1, failed_ptr, alarm_ptr, limit_ns, P, dtype, ASM
            )
            total = peer.add_in_order(rows, P, dtype)
            new = peer.add_residual(total, residual_ptr, new_residual_ptr, own + row * D + d, d < D, dtype)
            peer.tell_squares(squares_ptr, row, item % CHUNKS, new, calls, WIDE)
    if NORM & PHASES:
        for item in range(program, num_own, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            new = tl.load(new_residual_ptr + own + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
            squares = peer.wait_squares(squares_ptr, row, calls, CHUNKS, WIDE)
            out = peer.normed(new, squares, weight, eps, D)
            if LOCAL:
                tl.store(out_ptr + own + row * D + d, out, mask=d < D)
            else:
                peer.send_to_all(peers_ptr, results + (first + row) * D + d, out, d < D, P, dtype)
        if LOCAL:
            peer.count_call(state_ptr, calls, num_rows, MOST, 128)
    if (GATHER & PHASES) and not LOCAL:
        for item in range(program, num_items, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            owner = alarm_ptr + row // share
            rows = peer.wait_rows(mine + results + row * D, 0, d, d < D, 1, failed_ptr, owner, limit_ns, 1, dtype, ASM)
            out = peer.from_bits(rows[0], dtype).to(dtype)
            tl.store(out_ptr + whole + row * D + d, out, mask=d < D)
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)
