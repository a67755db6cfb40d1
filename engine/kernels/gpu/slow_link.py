"""Links that take their time, for a rank that is all its own peers: rows sent to a peer lie in a waiting room until as
long has passed as a link would take, and are then put where they belong.

It runs beside the kernels that it serves, one launch a call. Shape letters: P ranks, T rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl, peer
from engine.kernels.gpu.channel import REGISTERS, WARPS, Channel


@triton.jit(
    do_not_specialize=["num_rows", "delay_ns", "limit_ns"], do_not_specialize_on_alignment=["failed_ptr", "alarm_ptr"]
)
def slow_link_kernel(
    room_ptr, rows_ptr, state_ptr, failed_ptr, alarm_ptr, num_rows, delay_ns, limit_ns,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, P: tl.constexpr, CAPACITY: tl.constexpr,
    MOST: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of senders 1 to P - 1 from room [SETS, P, CAPACITY, D], where it leaves marks, to rows of the same shape."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    chunk, first, step = peer.portion(CHUNKS)
    d = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    stride: tl.constexpr = CAPACITY * D
    room = peer.rows_at(room_ptr.to(tl.int64), dtype)
    there = peer.rows_at(rows_ptr.to(tl.int64), dtype)
    alarms = peer.each(alarm_ptr, P)
    pdl.wait(PDL)
    calls, _ = peer.calls_so_far(state_ptr, MOST)
    for i in range(first, num_rows, step):
        place = peer.set_of(calls) * P * stride + peer.wide(i) * D
        rows = peer.wait_rows(room + place, stride, d, inside, -2, failed_ptr, alarms, limit_ns, P, dtype, ASM)
        start = peer.nanoseconds(ASM)
        while peer.nanoseconds(ASM) - start < delay_ns:
            pass
        for r in tl.static_range(1, P):
            tl.store(there + place + r * stride + d, rows[r], mask=inside)
        peer.put_marks(room + place + stride, stride, 0, d, inside, P - 1, D, dtype)
    peer.count_call(state_ptr, calls, num_rows, MOST, 128)


def slow_link(room: torch.Tensor, rows: torch.Tensor, channel: Channel, num_rows: int, delay_ns: int) -> None:
    """Carries one call's rows. room, rows: [SETS, P, capacity, D] of the channel's type; channel: one that counts the
    calls carried, whose own memory is not used."""
    constants = channel.constants()
    slow_link_kernel[channel.grid(num_rows)](
        room, rows, channel.state, channel.alarm.failed_V, channel.alarm.late_V2P, num_rows, delay_ns, channel.limit_ns,
        CAPACITY=channel.shape.capacity, **constants,
    )  # fmt: skip


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) at K2.5's width."""
    signature = {"room_ptr": "*bf16", "rows_ptr": "*bf16", "num_rows": "i32", "delay_ns": "i32", "limit_ns": "i64"}
    signature |= dict.fromkeys(("state_ptr", "failed_ptr", "alarm_ptr"), "*i32")
    constants = {
        "D": 7168, "BLOCK": 1024, "CHUNKS": 7, "P": 8, "CAPACITY": 64, "MOST": 528, "ASM": True,
        "PDL": capability >= (9, 0),
    }  # fmt: skip
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}
    return [("slow_link", slow_link_kernel, signature, constants, options)]
