"""Rows to the ranks that hold their experts, and their sums back to the ranks that own them. What is sent and what is
waited for follows from the experts' ids alone, so that no count is exchanged.

Programs as in `exchange`. Shape letters: T rows, t rows of this rank, R = P * t rows it may be sent, K experts a row, D
width, S parts, P ranks, V ranks of a launch. A group of GROUP ranks holds the same EXPERTS experts, each its columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu import pdl, peer
from engine.kernels.gpu.peer import GATHER, PUSH, SETS, SUM

NO_NOTE = tl.constexpr(-(2**63))


@triton.jit
def holders(ids_ptr, K: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr):
    """Bit set of the ranks that hold one of a row's experts. Every thread looks at all ids: no reduction."""
    group: tl.constexpr = (1 << GROUP) - 1
    ranks = tl.full((), 0, tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + k).to(tl.int32)
        bits = (ranks * 0 + group) << (tl.maximum(expert, 0) // EXPERTS * GROUP)
        ranks = ranks | tl.where(expert >= 0, bits, 0)
    return ranks


@triton.jit
def any_expert(ids_ptr, K: tl.constexpr):
    found = tl.full((), -1, tl.int32)
    for k in tl.static_range(K):
        found = tl.maximum(found, tl.load(ids_ptr + k).to(tl.int32))
    return found >= 0


@triton.jit
def load_notes(pointer, k, K: tl.constexpr):
    """(whether a note has not come, the largest local id)."""
    notes = tl.load(pointer + k, mask=k < K, other=-1, volatile=True)
    return tl.max((notes == NO_NOTE).to(tl.int32), 0), tl.max(notes.to(tl.int32), 0)


@triton.jit
def wait_notes(pointer, k, failed_ptr, alarm_ptr, limit_ns, K: tl.constexpr, ASM: tl.constexpr):
    """The largest local id of a row whose K notes have come: weight in the upper half, local id in the lower."""
    missing, largest = load_notes(pointer, k, K)
    if missing > 0:
        start = peer.nanoseconds(ASM)
        limit = peer.patience(failed_ptr, limit_ns, ASM)
        while missing > 0:
            missing, largest = load_notes(pointer, k, K)
            if (missing > 0) & (peer.nanoseconds(ASM) - start > limit):
                missing = tl.full((), -1, tl.int32)
        if missing < 0:
            tl.store(alarm_ptr, 1, mask=peer.gives_up_first(failed_ptr))
    return largest


@triton.jit(
    do_not_specialize=["num_rows", "share", "first_rank", "limit_ns"],
    do_not_specialize_on_alignment=["failed_ptr", "alarm_ptr"],
)
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
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = peer.of_rank(v, peers_ptr, state_ptr, failed_ptr, alarm_ptr, P, MOST)
    x_ptr, ids_ptr, weights_ptr = x_ptr + v * share * D, ids_ptr + v * share * K, weights_ptr + v * share * K
    all_rows = v * P * share
    out_ptr, out_ids_ptr, out_weights_ptr = (
        out_ptr + all_rows * D,
        out_ids_ptr + all_rows * K,
        out_weights_ptr + all_rows * K,
    )
    chunk, first, step = peer.portion(CHUNKS)
    d, k = chunk * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE_K)
    inside, stride = d < D, SHARE * D
    notes_at: tl.constexpr = SETS * P * SHARE * D * dtype.primitive_bitwidth // 8
    credits: tl.constexpr = notes_at + SETS * P * SHARE * K * 8
    num_own = tl.minimum(tl.maximum(num_rows - rank * share, 0), share)
    peers = peer.addresses(peers_ptr, P)
    mine = peer.rows_at(peer.pick(peers, rank, P), dtype)
    my_notes = (peer.pick(peers, rank, P) + notes_at).to(tl.pointer_type(tl.int64))
    pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    this = peer.set_of(calls) * P
    if PUSH & PHASES:
        told, begun = peer.ask_for_room(peers, rank, credits, calls, P)
        for i in range(first, num_own, step):
            row = peer.wide(i)
            ids = tl.load(ids_ptr + row * K + k, mask=k < K, other=-1).to(tl.int32)
            bits = peer.to_bits(tl.load(x_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32), dtype)
            weights = tl.load(weights_ptr + row * K + k, mask=k < K, other=0.0)
            high = weights.to(tl.int32, bitcast=True).to(tl.int64) << 32
            wanted = holders(ids_ptr + row * K, K, GROUP, EXPERTS)
            if i == first:
                peer.wait_for_room(told, begun, calls, failed_ptr, alarm_ptr, limit_ns, P, ASM)
            for p in tl.static_range(P):
                place = (this + rank) * stride + row * D
                tl.store(peer.rows_at(peers[p], dtype) + place + d, bits, mask=inside & (((wanted >> p) & 1) != 0))
                local = ids - p // GROUP * EXPERTS
                local = tl.where((local >= 0) & (local < EXPERTS) & (ids >= 0), local, -1)
                notes = (peers[p] + notes_at).to(tl.pointer_type(tl.int64)) + ((this + rank) * SHARE + row) * K
                tl.store(notes + k, high | (local.to(tl.int64) & 0xFFFFFFFF), mask=(k < K) & (chunk == 0))
        before = peer.set_of(calls + SETS - 1) * P
        for i in range(first, (rows_before + P - 1) // P, step):
            row = peer.wide(i)
            peer.put_marks(mine + before * stride, stride, row, d, inside, P, D, dtype)
            none = tl.zeros((WIDE_K,), tl.int64) + NO_NOTE
            for p in tl.static_range(P):
                tl.store(my_notes + ((before + p) * SHARE + row) * K + k, none, mask=(k < K) & (chunk == 0))
    if SUM & PHASES:
        for i in range(first, P * share, step):
            row = peer.wide(i)
            source = row // share
            at = row - source * share
            place = mine + (this + source) * stride + at * D
            rows, missing = peer.load_rows(place, 0, d, inside, 1, 1, dtype)  # a first look, beside that at the notes
            pointer = my_notes + ((this + source) * SHARE + at) * K
            largest = tl.full((), -1, tl.int32)
            if row < num_rows:
                largest = wait_notes(pointer, k, failed_ptr, alarm_ptr + source, limit_ns, K, ASM)
            if largest >= 0:
                rows = peer.wait_more(
                    rows, missing, place, 0, d, inside, 1, failed_ptr, (alarm_ptr + source,), limit_ns, 1, dtype, ASM
                )
                tl.store(out_ptr + row * D + d, peer.from_bits(rows[0], dtype).to(dtype), mask=inside)
            if chunk == 0:
                notes = tl.load(pointer + k, mask=(k < K) & (row < num_rows), other=-1, volatile=True)
                notes = tl.where(notes == NO_NOTE, -1, notes)  # given up
                weights = (notes >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                tl.store(out_ids_ptr + row * K + k, notes.to(tl.int32), mask=k < K)
                tl.store(out_weights_ptr + row * K + k, weights, mask=k < K)
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)


@triton.jit(
    do_not_specialize=["num_rows", "share", "first_rank", "limit_ns"],
    do_not_specialize_on_alignment=["failed_ptr", "alarm_ptr"],
)
def combine_kernel(
    partial_ptr, local_ids_ptr, ids_ptr, shared_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, share, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, GROUP: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr,
    SHARED: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr, PHASES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Partial rows [S, R, D] with an expert here back to their owners, who add them in the order of ranks, and the
    shared expert's, norm, and send the result to everyone: x [T, D] and this rank's residuals [t, D].

    A rank's memory as in `exchange.two_shot_kernel`.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = peer.of_rank(v, peers_ptr, state_ptr, failed_ptr, alarm_ptr, P, MOST)
    own, all_rows = v * share, v * P * share
    partial_ptr, local_ids_ptr, ids_ptr = (
        partial_ptr + all_rows * D * PARTS,
        local_ids_ptr + all_rows * K,
        ids_ptr + own * K,
    )
    residual_ptr, shared_ptr, new_residual_ptr = (
        residual_ptr + own * D,
        shared_ptr + own * D,
        new_residual_ptr + own * D,
    )
    out_ptr += v * num_rows * D
    chunk, first, step = peer.portion(CHUNKS)
    d = chunk * BLOCK + tl.arange(0, BLOCK)
    inside, stride = d < D, (CAPACITY // P) * D
    squares_at: tl.constexpr = SETS * 2 * CAPACITY * D * dtype.primitive_bitwidth // 8
    credits: tl.constexpr = squares_at + SETS * CAPACITY * WIDE * 8
    own_first = rank * share
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
        told, begun = peer.ask_for_room(peers, rank, credits, calls, P)
        for i in range(first, P * share, step):
            row = peer.wide(i)
            here = any_expert(local_ids_ptr + row * K, K)
            if i == first:
                peer.wait_for_room(told, begun, calls, failed_ptr, alarm_ptr, limit_ns, P, ASM)
            if here:
                total = peer.own_sum(partial_ptr, row, P * share, d, inside, D, PARTS)
                owner = row // share
                theirs = peer.rows_at(peer.pick(peers, owner, P), dtype)
                place = parts + rank * stride + (row - owner * share) * D
                tl.store(theirs + place + d, peer.to_bits(total, dtype), mask=inside)
        old_parts = peer.set_of(calls + SETS - 1) * P * stride
        old_sums = SETS * P * stride + peer.set_of(calls + SETS - 1) * CAPACITY * D
        share_before = (rows_before + P - 1) // P
        for i in range(first, rows_before, step):
            peer.put_marks(mine + old_sums, 0, peer.wide(i), d, inside, 1, D, dtype)
            if i < share_before:
                peer.put_marks(mine + old_parts, stride, peer.wide(i), d, inside, P, D, dtype)
    if SUM & PHASES:
        for i in range(first, num_own, step):
            row = peer.wide(i)
            residual = tl.load(residual_ptr + row * D + d, mask=inside, other=0.0)
            sources = holders(ids_ptr + row * K, K, GROUP, EXPERTS)
            rows = peer.wait_rows(
                mine + parts + row * D, stride, d, inside, sources, failed_ptr, alarms, limit_ns, P, dtype, ASM
            )
            total = peer.add_in_order(rows, P, dtype)
            if SHARED:
                total += tl.load(shared_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32)
            new = peer.add_residual(residual, total, dtype)
            peer.send_to_all(peers, sums + (own_first + row) * D + d, new, inside, P, dtype)
            peer.send_squares(peers, squares + ((own_first + row) * WIDE + chunk) * 8, new, calls, P)
            tl.store(new_residual_ptr + row * D + d, new, mask=inside)
    if GATHER & PHASES:
        peer.gather(
            peers, rank, sums, squares, out_ptr, weight, calls, num_rows, share, chunk, first, step, d, inside,
            failed_ptr, alarm_ptr, limit_ns, eps, D, CHUNKS, WIDE, P, AT_ONCE, ASM,
        )  # fmt: skip
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)
