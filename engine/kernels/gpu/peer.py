"""What kernels need to exchange rows with other ranks through memory that all of them can write.

A row that is sent carries its own arrival: its place holds a mark, the bits of minus zero, until the row is there, and
a row never holds that value. No barrier, no flag, no order between stores is needed (the idea of NCCL's low-latency
protocol and of TensorRT-LLM's one-shot all-reduce). Places are used in turn, three sets of them: a call writes one set
and puts the marks back into the set of the call before, which its reader has finished with and which nobody writes
before the call after the next.

Counts of calls live on the device, so that a captured graph finds the right set in every replay. Each program has its
own copy of them and brings those of programs that do not run this time up to date too.

Shape letters: V ranks of this launch (1, or all of a world on one device for tests), P ranks, D row width.
"""

from __future__ import annotations

import triton
import triton.language as tl

PUSH, SUM, NORM, GATHER = (tl.constexpr(1 << i) for i in range(4))
ALL_PHASES = 15
SETS = tl.constexpr(3)
CALLS = tl.constexpr(2**31 - 2)  # counted up to here, then from 0 again: a multiple of SETS, so that sets stay in turn


@triton.jit
def nanoseconds(ASM: tl.constexpr):
    """The GPU's clock; 0 where there is none, under the interpreter."""
    if ASM:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, is_pure=False, pack=1)
    else:
        return tl.full((), 0, tl.int64)


@triton.jit
def patience(failed_ptr, limit_ns, ASM: tl.constexpr):
    """How long to wait: not at all once this rank has given up before, nor under the interpreter, whose programs run
    one after another."""
    if ASM:
        return tl.where(tl.load(failed_ptr) != 0, 0, limit_ns)
    else:
        return tl.full((), -1, tl.int64)


@triton.jit
def gives_up_first(failed_ptr):
    """Notes that this rank waits no longer. Whether it still did: only then is it known who is late."""
    first = tl.load(failed_ptr, volatile=True) == 0
    tl.store(failed_ptr, 1)
    return first


@triton.jit
def wide(number):
    """As a 64-bit integer, so that what it is multiplied by does not overflow."""
    return tl.full((), 0, tl.int64) + number


@triton.jit
def mark_of(dtype: tl.constexpr):
    """The bits of minus zero."""
    if dtype.primitive_bitwidth == 32:
        return tl.full((), -(2**31), tl.int32)
    else:
        return tl.full((), -(2**15), tl.int16)


@triton.jit
def to_bits(values, dtype: tl.constexpr):
    """Float32 values rounded to dtype, as integers; minus zero, which is the mark, becomes zero."""
    mark = mark_of(dtype)
    bits = values.to(dtype).to(mark.dtype, bitcast=True)
    return tl.where(bits == mark, tl.zeros_like(bits), bits)


@triton.jit
def from_bits(bits, dtype: tl.constexpr):
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def addresses(peers_ptr, P: tl.constexpr):
    """Where the memory of each rank begins, as a tuple of integers. They never change, so that they may be read before
    the kernels before this one have ended."""
    found = ()
    for p in tl.static_range(P):
        found = found + (tl.load(peers_ptr + p),)  # noqa: RUF005 (the compiler knows no starred tuple)
    return found


@triton.jit
def pick(numbers, index, P: tl.constexpr):
    """numbers[index] of a tuple in registers."""
    found = numbers[0]
    for p in tl.static_range(1, P):
        found = tl.where(index == p, numbers[p], found)
    return found


@triton.jit
def rows_at(address, dtype: tl.constexpr):
    """Elements of the dtype's size, as integers."""
    return tl.multiple_of(address.to(tl.pointer_type(mark_of(dtype).dtype)), 16)


@triton.jit
def of_rank(v, peers_ptr, state_ptr, failed_ptr, alarm_ptr, P: tl.constexpr, MOST: tl.constexpr):
    """The same arrays from where those of rank v of the launch begin."""
    return peers_ptr + v * P, state_ptr + v * 2 * MOST, failed_ptr + v, alarm_ptr + v * 2 * P


@triton.jit
def each(alarm_ptr, P: tl.constexpr):
    """Where to note that a rank has not sent, for ranks 0 to P - 1. P places further on: one that may itself wait."""
    found = ()
    for p in tl.static_range(P):
        found = found + (alarm_ptr + p,)  # noqa: RUF005
    return found


@triton.jit
def portion(CHUNKS: tl.constexpr):
    """(chunk of rows, first row, rows to the next) of this program; there are as many programs for each chunk."""
    program = tl.program_id(0)
    return program % CHUNKS, program // CHUNKS, tl.num_programs(0) // CHUNKS


@triton.jit
def calls_so_far(state_ptr, MOST: tl.constexpr):
    """(number of calls before this one, rows of the last)."""
    program = tl.program_id(0)
    return tl.load(state_ptr + program), tl.load(state_ptr + MOST + program)


@triton.jit
def count_call(state_ptr, calls, num_rows, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """For this program and for every later one whose number differs by a multiple of the programs that run."""
    grid = tl.num_programs(0)
    following = tl.where(calls == CALLS - 1, 0, calls + 1)
    tl.debug_barrier()  # all of this program has read the count
    for first in range(0, MOST, BLOCK * grid):
        slots = first + tl.program_id(0) + tl.arange(0, BLOCK) * grid
        tl.store(state_ptr + slots, tl.zeros((BLOCK,), tl.int32) + following, mask=slots < MOST)
        tl.store(state_ptr + MOST + slots, tl.zeros((BLOCK,), tl.int32) + num_rows, mask=slots < MOST)


@triton.jit
def set_of(calls):
    """The set of places this call uses; the one after the next is that of the call before."""
    return (calls % SETS).to(tl.int64)


@triton.jit
def rows_there_are(first, step, num_rows, AT_ONCE: tl.constexpr):
    """Bit set of those of the rows first, first + step, ... that are below num_rows."""
    there = tl.full((), 0, tl.int32)
    for u in tl.static_range(AT_ONCE):
        there = there | (first + u * step < num_rows).to(tl.int32) << u
    return there


@triton.jit
def load_rows(pointer, stride, d, inside, sources, P: tl.constexpr, dtype: tl.constexpr):
    """What the P places hold, as a tuple, and whether a mark is among them. Of ranks that are not in the bit set
    `sources` nothing is expected: zeros."""
    mark = mark_of(dtype)
    rows = ()
    for r in tl.static_range(P):
        expected = inside & (((sources >> r) & 1) != 0)
        row = tl.load(pointer + r * stride + d, mask=expected, other=0, volatile=True)
        rows = rows + (row,)  # noqa: RUF005 (the compiler knows no starred tuple)
    seen = rows[0] == mark
    for r in tl.static_range(1, P):
        seen = seen | (rows[r] == mark)
    return rows, tl.max(seen.to(tl.int32), 0)


@triton.jit
def wait_rows(
    pointer, stride, d, inside, sources, failed_ptr, alarms, limit_ns,
    P: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`load_rows` once all marks are gone. After limit_ns it gives up: it notes in `alarms` which rows have not come,
    and every later wait of this rank ends at once, so that the step ends and its host can say so."""
    rows, missing = load_rows(pointer, stride, d, inside, sources, P, dtype)
    return wait_more(rows, missing, pointer, stride, d, inside, sources, failed_ptr, alarms, limit_ns, P, dtype, ASM)


@triton.jit
def wait_more(
    rows, missing, pointer, stride, d, inside, sources, failed_ptr, alarms, limit_ns,
    P: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`wait_rows` where a first look has been taken already."""
    if missing > 0:
        start = nanoseconds(ASM)
        limit = patience(failed_ptr, limit_ns, ASM)
        while missing > 0:
            rows, missing = load_rows(pointer, stride, d, inside, sources, P, dtype)
            if (missing > 0) & (nanoseconds(ASM) - start > limit):
                missing = tl.full((), -1, tl.int32)
        if missing < 0:
            first = gives_up_first(failed_ptr)
            for r in tl.static_range(P):
                late = tl.max((rows[r] == mark_of(dtype)).to(tl.int32), 0)
                tl.store(alarms[r], 1, mask=first & (late > 0))
    return rows


@triton.jit
def add_in_order(rows, P: tl.constexpr, dtype: tl.constexpr):
    """Float32 sum in the order of ranks."""
    total = from_bits(rows[0], dtype)
    for r in tl.static_range(1, P):
        total += from_bits(rows[r], dtype)
    return total


@triton.jit
def own_sums(
    partial_ptr, first, step, num_rows, d, inside, D: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """`own_sum` of rows first, first + step, ..., as a tuple: their loads are under way at the same time."""
    totals = ()
    for u in tl.static_range(AT_ONCE):
        row = wide(first + u * step)
        total = own_sum(partial_ptr, row, num_rows, d, inside & (row < num_rows), D, PARTS)
        totals = totals + (total,)  # noqa: RUF005
    return totals


@triton.jit
def own_sum(partial_ptr, row, num_rows, d, inside, D: tl.constexpr, PARTS: tl.constexpr):
    """Float32 sum of this rank's parts [PARTS, num_rows, D] of a row, in order."""
    total = tl.load(partial_ptr + row * D + d, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(partial_ptr + (part * num_rows + row) * D + d, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def send_to_all(peers, place, values, inside, P: tl.constexpr, dtype: tl.constexpr):
    """Float or rounded values to the same places of all ranks, this one included."""
    bits = to_bits(values.to(tl.float32), dtype)
    for p in tl.static_range(P):
        tl.store(rows_at(peers[p], dtype) + place, bits, mask=inside)


@triton.jit
def ask_for_room(peers, rank, credits: tl.constexpr, calls, P: tl.constexpr):
    """For calls in which a rank may wait for nobody: tells all ranks that this call has begun, and takes a first look
    at what they have told. Counts lie `credits` bytes into a rank's memory, one of each rank."""
    if tl.program_id(0) == 0:
        for p in tl.static_range(P):
            tl.store((peers[p] + credits).to(tl.pointer_type(tl.int32)) + rank, calls)
    own = (pick(peers, rank, P) + credits).to(tl.pointer_type(tl.int32))
    return own, behind(own, calls, P)


@triton.jit
def behind(own, calls, P: tl.constexpr):
    """Of each rank whether it has not begun the call before this one. Ranks are a few calls apart at most: more than
    half of all numbers lie between them only where one counts from 0 again."""
    ahead = tl.load(own + tl.arange(0, P), volatile=True) - (calls - 1)
    return ((ahead < 0) & (ahead > -(CALLS // 2))) | ((ahead > CALLS // 2) & (ahead < CALLS))


@triton.jit
def wait_for_room(own, late, calls, failed_ptr, alarm_ptr, limit_ns, P: tl.constexpr, ASM: tl.constexpr):
    """Returns when all ranks have begun the call before this one: then the places of this call are marked again."""
    waiting = tl.max(late.to(tl.int32), 0)
    if waiting > 0:
        start = nanoseconds(ASM)
        limit = patience(failed_ptr, limit_ns, ASM)
        while waiting > 0:
            late = behind(own, calls, P)
            waiting = tl.max(late.to(tl.int32), 0)
            if (waiting > 0) & (nanoseconds(ASM) - start > limit):
                waiting = tl.full((), -1, tl.int32)
        if waiting < 0:
            tl.store(alarm_ptr + P + tl.arange(0, P), 1, mask=late & gives_up_first(failed_ptr))


@triton.jit
def put_marks(pointer, stride, row, d, inside, P: tl.constexpr, D: tl.constexpr, dtype: tl.constexpr):
    marks = tl.zeros_like(d).to(mark_of(dtype).dtype) + mark_of(dtype)
    for r in tl.static_range(P):
        tl.store(pointer + r * stride + row * D + d, marks, mask=inside)


@triton.jit
def add_residual(residual, total, dtype: tl.constexpr):
    """In the residual's type, rounded as the layers' own `add_norm` does."""
    return (residual.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def stamped(values, calls):
    """The sum of squares of values, stamped with the call."""
    values = values.to(tl.float32)
    total = tl.sum(values * values, 0)
    return (calls.to(tl.int64) << 32) | (total.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def send_squares(peers, place, values, calls, P: tl.constexpr):
    """The sum of squares of a chunk of a row to all ranks: `place` bytes into their memory."""
    note = stamped(values, calls)
    for p in tl.static_range(P):
        tl.store((peers[p] + place).to(tl.pointer_type(tl.int64)), note)


@triton.jit
def tell_squares(squares_ptr, row, chunk, values, calls, WIDE: tl.constexpr):
    """The sum of squares of one chunk of a row, stamped with the call, for the programs of the row's other chunks."""
    tl.store(squares_ptr + row * WIDE + chunk, stamped(values, calls))


@triton.jit
def load_squares(pointer, calls, CHUNKS: tl.constexpr, WIDE: tl.constexpr):
    """(sum over a row's chunks, whether one has not come). One load a warp, of neighbours: many programs ask for the
    same notes at the same time."""
    chunk = tl.arange(0, WIDE)
    notes = tl.load(pointer + chunk, mask=chunk < CHUNKS, other=0, volatile=True)
    missing = ((notes >> 32).to(tl.int32) != calls) & (chunk < CHUNKS)
    squares = tl.where(chunk < CHUNKS, notes.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    return tl.sum(squares, 0), tl.max(missing.to(tl.int32), 0)


@triton.jit
def wait_squares(
    pointer, calls, failed_ptr, alarm_ptr, limit_ns, CHUNKS: tl.constexpr, WIDE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Sum of squares of a whole row, whose owner is the rank of alarm_ptr; gives up as `wait_rows` does."""
    total, missing = load_squares(pointer, calls, CHUNKS, WIDE)
    if missing > 0:
        start = nanoseconds(ASM)
        limit = patience(failed_ptr, limit_ns, ASM)
        while missing > 0:
            total, missing = load_squares(pointer, calls, CHUNKS, WIDE)
            if (missing > 0) & (nanoseconds(ASM) - start > limit):
                missing = tl.full((), -1, tl.int32)
        if missing < 0:
            tl.store(alarm_ptr, 1, mask=gives_up_first(failed_ptr))
    return total


@triton.jit
def normed(values, squares, weight, eps, D: tl.constexpr):
    """RMSNorm of a chunk, rounded as `norm.normalized` does; in the weight's type."""
    return (values.to(tl.float32) * tl.rsqrt(squares / D + eps)).to(weight.dtype) * weight


@triton.jit
def gather(
    peers, rank, sums, squares, out_ptr, weight, calls, num_rows, share, chunk, first, step, d, inside,
    failed_ptr, alarm_ptr, limit_ns, eps,
    D: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, AT_ONCE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The rows whose owners have sent their sums, and their squares, to all ranks: normed, to out [T, D]."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    own = pick(peers, rank, P)
    notes = (own + squares).to(tl.pointer_type(tl.int64))
    for i in range(first, num_rows, AT_ONCE * step):
        there = rows_there_are(i, step, num_rows, AT_ONCE)
        owners = ()
        for u in tl.static_range(AT_ONCE):
            owners = owners + (alarm_ptr + P + (i + u * step) // share,)  # noqa: RUF005
        rows = wait_rows(
            rows_at(own, dtype) + sums + wide(i) * D, wide(step) * D, d, inside, there, failed_ptr, owners, limit_ns,
            AT_ONCE, dtype, ASM,
        )  # fmt: skip
        for u in tl.static_range(AT_ONCE):
            row = wide(i + u * step)
            if row < num_rows:
                total = wait_squares(notes + row * WIDE, calls, failed_ptr, owners[u], limit_ns, CHUNKS, WIDE, ASM)
                values = from_bits(rows[u], dtype)
                tl.store(out_ptr + row * D + d, normed(values, total, weight, eps, D), mask=inside)
