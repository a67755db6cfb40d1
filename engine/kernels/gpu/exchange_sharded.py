"""Rows to the ranks that hold their experts, and their sums back to the ranks that own them. What is sent and what is
waited for follows from the experts' ids alone, so that no count is exchanged.

Shape letters: T rows, t rows of this rank, R = P * t rows it may be sent, K experts a row, D width, S parts, P ranks,
V ranks of a launch. A group of GROUP ranks holds the same EXPERTS experts, each its columns of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu import pdl, peer
from engine.kernels.gpu.peer import GATHER, NORM, PUSH, SETS, SUM

NO_NOTE = tl.constexpr(-(2**63))


@triton.jit
def holders(ids, P: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr):
    """Bit set of the ranks that hold one of a row's experts."""
    ranks = tl.full((), 0, tl.int32)
    for p in tl.static_range(P):
        first = p // GROUP * EXPERTS
        here = tl.max(((ids >= first) & (ids < first + EXPERTS)).to(tl.int32), 0)
        ranks = ranks | (here << p)
    return ranks


@triton.jit
def load_notes(pointer, k, K: tl.constexpr):
    notes = tl.load(pointer + k, mask=k < K, other=-1, volatile=True)
    return notes, tl.max((notes == NO_NOTE).to(tl.int32), 0)


@triton.jit
def wait_notes(pointer, k, failed_ptr, alarm_ptr, limit_ns, K: tl.constexpr, ASM: tl.constexpr):
    """A row's K notes: weight in the upper half, local id in the lower. On giving up no expert."""
    notes, missing = load_notes(pointer, k, K)
    if missing > 0:
        start = peer.nanoseconds(ASM)
        limit = peer.patience(failed_ptr, limit_ns, ASM)
        while missing > 0:
            notes, missing = load_notes(pointer, k, K)
            if (missing > 0) & (peer.nanoseconds(ASM) - start > limit):
                missing = tl.full((), -1, tl.int32)
        if missing < 0:
            tl.store(failed_ptr, 1)
            tl.store(alarm_ptr, 1)
    return tl.where(notes == NO_NOTE, -1, notes)


@triton.jit(do_not_specialize=["num_rows", "share", "first_rank", "limit_ns"])
def dispatch_kernel(
    x_ptr, ids_ptr, weights_ptr, out_ptr, out_ids_ptr, out_weights_ptr,
    peers_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, share, first_rank, limit_ns,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, WIDE_K: tl.constexpr,
    P: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr, SHARE: tl.constexpr, MOST: tl.constexpr,
    PHASES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This rank's rows [t, D] with ids [t, K], counted over all experts, to the ranks that hold those; rows [R, D] from
    all ranks with local ids [R, K], -1 = not here. A row that is not sent stays unwritten.

    A rank's memory: rows [SETS, P senders, SHARE, D], notes int64 [SETS, P senders, SHARE, K], counts of calls.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = (
        peers_ptr + v * P,
        state_ptr + v * 2 * MOST,
        failed_ptr + v,
        alarm_ptr + v * P,
    )
    own, all_rows = v * share, v * P * share
    column, k = tl.arange(0, BLOCK), tl.arange(0, WIDE_K)
    stride, notes_at = SHARE * D, SETS * P * SHARE * D * (dtype.primitive_bitwidth // 8)
    program, grid = tl.program_id(0), tl.num_programs(0)
    num_own = tl.minimum(tl.maximum(num_rows - rank * share, 0), share)
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    this = peer.set_of(calls) * P
    mine = peer.address(peers_ptr, rank, dtype)
    my_notes = (tl.load(peers_ptr + rank) + notes_at).to(tl.pointer_type(tl.int64))
    if PUSH & PHASES:
        credits: tl.constexpr = SETS * P * SHARE * (D * dtype.primitive_bitwidth // 8 + 8 * K)
        peer.wait_for_room(peers_ptr, rank, credits, calls, failed_ptr, alarm_ptr, limit_ns, P, ASM)
        for item in range(program, num_own * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            ids = tl.load(ids_ptr + (own + row) * K + k, mask=k < K, other=-1).to(tl.int32)
            x = tl.load(x_ptr + (own + row) * D + d, mask=d < D, other=0.0)
            bits = peer.to_bits(x.to(tl.float32), dtype)
            wanted = holders(ids, P, GROUP, EXPERTS)
            weights = tl.load(weights_ptr + (own + row) * K + k, mask=k < K, other=0.0)
            high = weights.to(tl.int32, bitcast=True).to(tl.int64) << 32
            for p in tl.static_range(P):
                first = p // GROUP * EXPERTS
                theirs = peer.address(peers_ptr, p, dtype)
                place = (this + rank) * stride + row * D
                tl.store(theirs + place + d, bits, mask=(d < D) & (((wanted >> p) & 1) != 0))
                if item % CHUNKS == 0:
                    local = tl.where((ids >= first) & (ids < first + EXPERTS), ids - first, -1)
                    note = high | (local.to(tl.int64) & 0xFFFFFFFF)
                    notes = (tl.load(peers_ptr + p) + notes_at).to(tl.pointer_type(tl.int64))
                    tl.store(notes + ((this + rank) * SHARE + row) * K + k, note, mask=k < K)
        before = peer.set_of(calls + SETS - 1) * P
        share_before = (rows_before + P - 1) // P
        for item in range(program, share_before * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            peer.put_marks(mine + before * stride, stride, row, d, d < D, P, D, dtype)
            if item % CHUNKS == 0:
                none = tl.zeros((WIDE_K,), tl.int64) + NO_NOTE
                for p in tl.static_range(P):
                    tl.store(my_notes + ((before + p) * SHARE + row) * K + k, none, mask=k < K)
    if SUM & PHASES:
        for item in range(program, P * share * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            source = row // share
            at = row - source * share
            notes = tl.full((WIDE_K,), -1, tl.int64)
            if row < num_rows:
                pointer = my_notes + ((this + source) * SHARE + at) * K
                notes = wait_notes(pointer, k, failed_ptr, alarm_ptr + source, limit_ns, K, ASM)
            ids = notes.to(tl.int32)
            if tl.max(ids, 0) >= 0:
                place = mine + (this + source) * stride + at * D
                rows = peer.wait_rows(place, 0, d, d < D, 1, failed_ptr, alarm_ptr + source, limit_ns, 1, dtype, ASM)
                x = peer.from_bits(rows[0], dtype).to(dtype)
                tl.store(out_ptr + (all_rows + row) * D + d, x, mask=d < D)
            if item % CHUNKS == 0:
                weights = (notes >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                tl.store(out_ids_ptr + (all_rows + row) * K + k, ids, mask=k < K)
                tl.store(out_weights_ptr + (all_rows + row) * K + k, weights, mask=k < K)
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)


@triton.jit(do_not_specialize=["num_rows", "share", "first_rank", "limit_ns"])
def combine_kernel(
    partial_ptr, local_ids_ptr, ids_ptr, shared_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, squares_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, share, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr,
    WIDE_K: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr,
    SHARED: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, PHASES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Partial rows [S, R, D] with an expert here back to their owners, who add them in the order of ranks, and the
    shared expert's, norm, and send the result to everyone: x [T, D] and this rank's residuals [t, D].

    A rank's memory as in `exchange.two_shot_kernel`.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    whole, own, all_rows = v * num_rows * D, v * share, v * P * share
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = (
        peers_ptr + v * P,
        state_ptr + v * 2 * MOST,
        failed_ptr + v,
        alarm_ptr + v * P,
    )
    squares_ptr += v * CAPACITY * WIDE
    column, k = tl.arange(0, BLOCK), tl.arange(0, WIDE_K)
    stride = (CAPACITY // P) * D
    program, grid = tl.program_id(0), tl.num_programs(0)
    first = rank * share
    num_own = tl.minimum(tl.maximum(num_rows - first, 0), share) * CHUNKS
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    parts = peer.set_of(calls) * P * stride
    results = SETS * P * stride + peer.set_of(calls) * CAPACITY * D
    mine = peer.address(peers_ptr, rank, dtype)
    if PUSH & PHASES:
        credits: tl.constexpr = SETS * 2 * CAPACITY * D * dtype.primitive_bitwidth // 8
        peer.wait_for_room(peers_ptr, rank, credits, calls, failed_ptr, alarm_ptr, limit_ns, P, ASM)
        for item in range(program, P * share * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            ids = tl.load(local_ids_ptr + (all_rows + row) * K + k, mask=k < K, other=-1).to(tl.int32)
            if tl.max(ids, 0) >= 0:
                mine_of_row = partial_ptr + all_rows * D * PARTS
                total = peer.own_sum(mine_of_row, row, P * share, d, d < D, D, PARTS)
                owner = row // share
                theirs = peer.address(peers_ptr, owner, dtype)
                place = parts + rank * stride + (row - owner * share) * D
                tl.store(theirs + place + d, peer.to_bits(total, dtype), mask=d < D)
        old_parts = peer.set_of(calls + SETS - 1) * P * stride
        old_results = SETS * P * stride + peer.set_of(calls + SETS - 1) * CAPACITY * D
        share_before = (rows_before + P - 1) // P
        for item in range(program, rows_before * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            peer.put_marks(mine + old_results, 0, row, d, d < D, 1, D, dtype)
            if row < share_before:
                peer.put_marks(mine + old_parts, stride, row, d, d < D, P, D, dtype)
    if SUM & PHASES:
        for item in range(program, num_own, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            ids = tl.load(ids_ptr + (own + row) * K + k, mask=k < K, other=-1).to(tl.int32)
            sources = holders(ids, P, GROUP, EXPERTS)
            rows = peer.wait_rows(
                mine + parts + row * D, stride, d, d < D, sources, failed_ptr, alarm_ptr, limit_ns, P, dtype, ASM
            )
            total = peer.add_in_order(rows, P, dtype)
            if SHARED:
                total += tl.load(shared_ptr + (own + row) * D + d, mask=d < D, other=0.0).to(tl.float32)
            offset = (own + row) * D + d
            new = peer.add_residual(total, residual_ptr, new_residual_ptr, offset, d < D, dtype)
            peer.tell_squares(squares_ptr, row, item % CHUNKS, new, calls, WIDE)
    if NORM & PHASES:
        for item in range(program, num_own, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            new = tl.load(new_residual_ptr + (own + row) * D + d, mask=d < D, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + d, mask=d < D, other=0.0)
            squares = peer.wait_squares(squares_ptr, row, calls, CHUNKS, WIDE)
            out = peer.normed(new, squares, weight, eps, D)
            peer.send_to_all(peers_ptr, results + (first + row) * D + d, out, d < D, P, dtype)
    if GATHER & PHASES:
        for item in range(program, num_rows * CHUNKS, grid):
            row, d = peer.wide(item // CHUNKS), item % CHUNKS * BLOCK + column
            owner = alarm_ptr + row // share
            rows = peer.wait_rows(mine + results + row * D, 0, d, d < D, 1, failed_ptr, owner, limit_ns, 1, dtype, ASM)
            out = peer.from_bits(rows[0], dtype).to(dtype)
            tl.store(out_ptr + whole + row * D + d, out, mask=d < D)
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)
