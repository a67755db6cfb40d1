"""Sum over ranks, residual and RMSNorm in one kernel, which also carries the rows: once straight to everyone, or by way
of each row's owner.

Program (i, v) works for rank first_rank + v on chunk i % CHUNKS of the rows i // CHUNKS, and so many further on; the
programs of a launch all run at a time. Constants that hold for all of a kernel's life are read before `pdl.wait`.

Shape letters: T rows, t rows of this rank, D width, S parts of this rank's sum, P ranks, V ranks of a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu import pdl, peer
from engine.kernels.gpu.peer import GATHER, NORM, PUSH, SETS, SUM


@triton.jit
def sum_rows(
    rows_ptr, residual_ptr, new_residual_ptr, squares_ptr, calls, num_rows, chunk, first, step, d, inside,
    failed_ptr, alarms, limit_ns,
    D: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, STRIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A chunk of the rows first, first + step, ... from all P ranks, STRIDE apart, added to the residuals."""
    dtype: tl.constexpr = new_residual_ptr.dtype.element_ty
    for i in range(first, num_rows, step):
        row = peer.wide(i)
        residual = tl.load(residual_ptr + row * D + d, mask=inside, other=0.0)
        rows = peer.wait_rows(rows_ptr + row * D, STRIDE, d, inside, -1, failed_ptr, alarms, limit_ns, P, dtype, ASM)
        new = peer.add_residual(residual, peer.add_in_order(rows, P, dtype), dtype)
        peer.tell_squares(squares_ptr, row, chunk, new, calls, WIDE)
        tl.store(new_residual_ptr + row * D + d, new, mask=inside)


@triton.jit
def norm_rows(
    new_residual_ptr, out_ptr, weight, squares_ptr, calls, num_rows, first, step, d, inside,
    failed_ptr, own_alarm_ptr, limit_ns, eps,
    D: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same chunk normed, once the programs of the row's other chunks have told their sums of squares."""
    for i in range(first, num_rows, step):
        row = peer.wide(i)
        new = tl.load(new_residual_ptr + row * D + d, mask=inside, other=0.0)
        squares = peer.wait_squares(
            squares_ptr + row * WIDE, calls, failed_ptr, own_alarm_ptr, limit_ns, CHUNKS, WIDE, ASM
        )
        tl.store(out_ptr + row * D + d, peer.normed(new, squares, weight, eps, D), mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "first_rank", "limit_ns"], do_not_specialize_on_alignment=["failed_ptr", "alarm_ptr"]
)
def one_shot_kernel(
    partial_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, squares_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr, PHASES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every rank sends its row to every rank, and all of them add the P rows up.

    A rank's memory: rows [SETS, P senders, CAPACITY, D].
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = peer.of_rank(v, peers_ptr, state_ptr, failed_ptr, alarm_ptr, P, MOST)
    whole = v * num_rows * D
    partial_ptr, residual_ptr = partial_ptr + whole * PARTS, residual_ptr + whole
    out_ptr, new_residual_ptr = out_ptr + whole, new_residual_ptr + whole
    squares_ptr += v * CAPACITY * WIDE
    chunk, first, step = peer.portion(CHUNKS)
    d = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    stride: tl.constexpr = CAPACITY * D
    peers = peer.addresses(peers_ptr, P)
    mine = peer.rows_at(peer.pick(peers, rank, P), dtype)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    alarms = peer.each(alarm_ptr, P)
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    place = peer.set_of(calls) * P * stride
    if PUSH & PHASES:
        for i in range(first, num_rows, AT_ONCE * step):
            totals = peer.own_sums(partial_ptr, i, step, num_rows, d, inside, D, PARTS, AT_ONCE)
            for u in tl.static_range(AT_ONCE):
                row = peer.wide(i + u * step)
                there = place + rank * stride + row * D + d
                peer.send_to_all(peers, there, totals[u], inside & (row < num_rows), P, dtype)
        before = peer.set_of(calls + SETS - 1) * P * stride
        for i in range(first, rows_before, step):
            peer.put_marks(mine + before, stride, peer.wide(i), d, inside, P, D, dtype)
    if SUM & PHASES:
        sum_rows(
            mine + place, residual_ptr, new_residual_ptr, squares_ptr, calls, num_rows, chunk, first, step, d, inside,
            failed_ptr, alarms, limit_ns, D, WIDE, P, stride, ASM,
        )  # fmt: skip
    if NORM & PHASES:
        norm_rows(
            new_residual_ptr, out_ptr, weight, squares_ptr, calls, num_rows, first, step, d, inside,
            failed_ptr, alarm_ptr + rank, limit_ns, eps, D, CHUNKS, WIDE, ASM,
        )  # fmt: skip
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)


@triton.jit(
    do_not_specialize=["num_rows", "share", "first_rank", "limit_ns"],
    do_not_specialize_on_alignment=["failed_ptr", "alarm_ptr"],
)
def two_shot_kernel(
    partial_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, squares_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, share, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, LOCAL: tl.constexpr,
    AT_ONCE: tl.constexpr, PHASES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every row goes to its owner, who adds it up and sends it to everyone to be normed; or keeps it normed, if LOCAL.

    Rank r owns rows [r * share, (r + 1) * share) and their residuals. A rank's memory: arriving parts [SETS, P senders,
    CAPACITY / P, D], sums [SETS, CAPACITY, D], their squares int64 [SETS, CAPACITY, WIDE], senders' counts of calls.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = peer.of_rank(v, peers_ptr, state_ptr, failed_ptr, alarm_ptr, P, MOST)
    partial_ptr, residual_ptr = partial_ptr + v * num_rows * D * PARTS, residual_ptr + v * share * D
    out_ptr, new_residual_ptr = out_ptr + v * (share if LOCAL else num_rows) * D, new_residual_ptr + v * share * D
    squares_ptr += v * CAPACITY * WIDE
    chunk, first, step = peer.portion(CHUNKS)
    d = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, stride = d < D, (CAPACITY // P) * D
    own_first = rank * share
    squares_at: tl.constexpr = SETS * 2 * CAPACITY * D * dtype.primitive_bitwidth // 8
    credits: tl.constexpr = squares_at + SETS * CAPACITY * WIDE * 8
    num_own = tl.minimum(tl.maximum(num_rows - own_first, 0), share)
    peers = peer.addresses(peers_ptr, P)
    mine = peer.rows_at(peer.pick(peers, rank, P), dtype)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    alarms = peer.each(alarm_ptr, P)
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    parts = peer.set_of(calls) * P * stride
    sums = SETS * P * stride + peer.set_of(calls) * CAPACITY * D
    squares = squares_at + peer.set_of(calls) * CAPACITY * WIDE * 8
    if PUSH & PHASES:
        if LOCAL:
            told, begun = peer.ask_for_room(peers, rank, credits, calls, P)
            peer.wait_for_room(told, begun, calls, failed_ptr, alarm_ptr, limit_ns, P, ASM)
        for i in range(first, num_rows, AT_ONCE * step):
            totals = peer.own_sums(partial_ptr, i, step, num_rows, d, inside, D, PARTS, AT_ONCE)
            for u in tl.static_range(AT_ONCE):
                row = peer.wide(i + u * step)
                owner = row // share
                theirs = peer.rows_at(peer.pick(peers, owner, P), dtype)
                place = parts + rank * stride + (row - owner * share) * D
                tl.store(theirs + place + d, peer.to_bits(totals[u], dtype), mask=inside & (row < num_rows))
        old_parts = peer.set_of(calls + SETS - 1) * P * stride
        old_sums = SETS * P * stride + peer.set_of(calls + SETS - 1) * CAPACITY * D
        share_before = (rows_before + P - 1) // P
        for i in range(first, rows_before, step):
            if not LOCAL:
                peer.put_marks(mine + old_sums, 0, peer.wide(i), d, inside, 1, D, dtype)
            if i < share_before:
                peer.put_marks(mine + old_parts, stride, peer.wide(i), d, inside, P, D, dtype)
    if SUM & PHASES:
        for i in range(first, num_own, step):
            row = peer.wide(i)
            residual = tl.load(residual_ptr + row * D + d, mask=inside, other=0.0)
            rows = peer.wait_rows(
                mine + parts + row * D, stride, d, inside, -1, failed_ptr, alarms, limit_ns, P, dtype, ASM
            )
            new = peer.add_residual(residual, peer.add_in_order(rows, P, dtype), dtype)
            if LOCAL:
                peer.tell_squares(squares_ptr, row, chunk, new, calls, WIDE)
            else:
                peer.send_to_all(peers, sums + (own_first + row) * D + d, new, inside, P, dtype)
                peer.send_squares(peers, squares + ((own_first + row) * WIDE + chunk) * 8, new, calls, P)
            tl.store(new_residual_ptr + row * D + d, new, mask=inside)
    if LOCAL:
        if NORM & PHASES:
            for i in range(first, num_own, step):
                row = peer.wide(i)
                new = tl.load(new_residual_ptr + row * D + d, mask=inside, other=0.0)
                total = peer.wait_squares(
                    squares_ptr + row * WIDE, calls, failed_ptr, alarm_ptr + rank, limit_ns, CHUNKS, WIDE, ASM
                )
                tl.store(out_ptr + row * D + d, peer.normed(new, total, weight, eps, D), mask=inside)
            peer.count_call(state_ptr, calls, num_rows, MOST, 128)
    elif GATHER & PHASES:
        peer.gather(
            peers, rank, sums, squares, out_ptr, weight, calls, num_rows, share, chunk, first, step, d, inside,
            failed_ptr, alarm_ptr, limit_ns, eps, D, CHUNKS, WIDE, P, AT_ONCE, ASM,
        )  # fmt: skip
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)
