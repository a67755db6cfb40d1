"""The memory an exchange kernel works in, and its launches.

Shape letters: V ranks of a launch (1; all ranks of a world in tests on one device), P ranks, T rows, t rows of a rank,
R = P * t, S parts of a sum, K experts a row, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from engine.kernels.gpu import exchange, exchange_sharded
from engine.kernels.gpu.device import num_processors
from engine.kernels.gpu.pdl import launch_options
from engine.kernels.gpu.peer import ALL_PHASES

SETS = 3
CHUNK = 1024  # columns of a row that a program works on
WARPS = 4
REGISTERS = 128  # a thread; so many leave room for PROGRAMS on a multiprocessor of 65,536
PROGRAMS = 4  # a multiprocessor; all programs of a launch run at a time, since they wait for each other


def most_programs(device: torch.device) -> int:
    return PROGRAMS * num_processors(device) if device.type == "cuda" else 64


@dataclass(frozen=True)
class Shape:
    """P ranks exchange up to `capacity` rows, a multiple of P, of `width` numbers, with `top_k` experts each."""

    ranks: int
    capacity: int
    width: int
    dtype: torch.dtype
    top_k: int = 0

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Places for what programs tell each other of a row's chunks."""
        return triton.next_power_of_2(triton.cdiv(self.width, CHUNK))

    @property
    def one_shot_bytes(self) -> int:
        return SETS * self.ranks * self.capacity * self.row_bytes

    @property
    def two_shot_bytes(self) -> int:
        return SETS * self.capacity * (2 * self.row_bytes + 8 * self.wide) + 4 * self.ranks

    @property
    def dispatch_bytes(self) -> int:
        return SETS * self.capacity * (self.row_bytes + 8 * self.top_k) + 4 * self.ranks

    def mark(self, memory: torch.Tensor, num_rows: int, num_notes: int = 0) -> None:
        """Makes uint8 memory ready: marks in the rows, then notes that say nothing, then counts of no calls."""
        bits = torch.int32 if self.dtype.itemsize == 4 else torch.int16
        rows_end = num_rows * self.row_bytes
        notes_end = rows_end + 8 * num_notes
        memory[:rows_end].view(bits).fill_(torch.iinfo(bits).min)
        memory[rows_end:notes_end].view(torch.int64).fill_(torch.iinfo(torch.int64).min)
        memory[notes_end:].zero_()


@dataclass(frozen=True)
class Alarm:
    """What kernels leave when they first gave up waiting. failed_V: int32 on the device. late_V2P: int32, where the
    host reads it without waiting: 1 for each rank that has sent nothing, then for each that may have been waiting."""

    failed_V: torch.Tensor
    late_V2P: torch.Tensor

    @classmethod
    def on(cls, device: torch.device, ranks: int, launched: int = 1) -> Alarm:
        late = torch.zeros(launched, 2, ranks, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(torch.zeros(launched, dtype=torch.int32, device=device), late)


@dataclass(frozen=True)
class Channel:
    """addresses_VP: int64, where each rank's memory begins as rank v reaches it. state, squares: the kernel's own.
    limit_ns: nanoseconds a kernel waits for another rank before it gives up."""

    shape: Shape
    addresses_VP: torch.Tensor
    state: torch.Tensor
    squares: torch.Tensor
    alarm: Alarm
    first_rank: int
    limit_ns: int

    @classmethod
    def over(
        cls, shape: Shape, addresses_VP: torch.Tensor, alarm: Alarm, first_rank: int, limit_seconds: float
    ) -> Channel:
        launched, device = addresses_VP.shape[0], addresses_VP.device
        return cls(
            shape,
            addresses_VP,
            torch.zeros(launched, 2, most_programs(device), dtype=torch.int32, device=device),
            # Stamps that no call has: -1.
            torch.full((launched, shape.capacity, shape.wide), -1, dtype=torch.int64, device=device),
            alarm,
            first_rank,
            int(limit_seconds * 1e9),
        )

    @property
    def launched(self) -> int:
        return self.addresses_VP.shape[0]

    def share(self, num_rows: int) -> int:
        return -(-num_rows // self.shape.ranks)

    def grid(self, num_rows: int) -> tuple[int, int]:
        """All chunks of a row are worked on at a time, and all programs of the launch."""
        chunks = triton.cdiv(self.shape.width, CHUNK)
        fitting = max(self.state.shape[2] // self.launched // chunks, 1)
        return min(num_rows, fitting) * chunks, self.launched

    def at_once(self, num_rows: int) -> int:
        """Rows that a program with several works on together."""
        return 4 if num_rows > self.grid(num_rows)[0] // triton.cdiv(self.shape.width, CHUNK) else 1

    def constants(self) -> dict:
        width = self.shape.width
        return {
            "D": width,
            "BLOCK": min(CHUNK, triton.next_power_of_2(width)),
            "CHUNKS": triton.cdiv(width, CHUNK),
            "P": self.shape.ranks,
            "MOST": self.state.shape[2],
            "ASM": self.state.is_cuda,
            "num_warps": WARPS,
            "maxnreg": REGISTERS,
            **launch_options(self.state.device),
        }

    def pointers(self, squares: bool = True) -> tuple[torch.Tensor, ...]:
        middle = (self.squares,) if squares else ()
        return (self.addresses_VP, *middle, self.state, self.alarm.failed_V, self.alarm.late_V2P)


def one_shot(
    partial: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    channel: Channel,
    phases: int = ALL_PHASES,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of residual + sum over ranks, residual + sum), every row on every rank.

    partial: [T, D] or parts [S, T, D] of this rank, any float type; sent in the residual's. With V ranks in a launch
    all tensors but the weight have V in front.
    """
    num_rows = residual_TD.shape[-2]
    x_TD, new_TD = out or (torch.empty_like(residual_TD), torch.empty_like(residual_TD))
    exchange.one_shot_kernel[channel.grid(num_rows)](
        partial, residual_TD, weight_D, x_TD, new_TD, *channel.pointers(),
        num_rows, channel.first_rank, channel.limit_ns, eps, AT_ONCE=channel.at_once(num_rows),
        WIDE=channel.shape.wide, PARTS=partial.numel() // residual_TD.numel(), CAPACITY=channel.shape.capacity,
        PHASES=phases, **channel.constants(),
    )  # fmt: skip
    return x_TD, new_TD


def two_shot(
    partial: torch.Tensor,
    residual_tD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    channel: Channel,
    num_rows: int,
    gather: bool = True,
    phases: int = ALL_PHASES,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the sum of a row made by its owner: x [T, D] of all rows, or [t, D] without `gather`, and this
    rank's residuals [t, D]."""
    share = channel.share(num_rows)
    rows = num_rows if gather else share
    x_shape = (*residual_tD.shape[:-2], rows, residual_tD.shape[-1])
    x, new_tD = out or (residual_tD.new_empty(x_shape), torch.empty_like(residual_tD))
    parts = partial.numel() // (channel.launched * num_rows * channel.shape.width)
    exchange.two_shot_kernel[channel.grid(num_rows)](
        partial, residual_tD, weight_D, x, new_tD, *channel.pointers(),
        num_rows, share, channel.first_rank, channel.limit_ns, eps, AT_ONCE=channel.at_once(num_rows),
        WIDE=channel.shape.wide, PARTS=parts, CAPACITY=channel.shape.capacity, LOCAL=not gather,
        PHASES=phases, **channel.constants(),
    )  # fmt: skip
    return x, new_tD


def dispatch(
    x_tD: torch.Tensor,
    ids_tK: torch.Tensor,
    weights_tK: torch.Tensor,
    channel: Channel,
    num_rows: int,
    experts: int,
    group: int = 1,
    phases: int = ALL_PHASES,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [R, D] of all ranks that have an expert here, local ids int32 [R, K] and weights [R, K]; other rows hold
    nothing and have ids -1. `group` ranks hold the same `experts` experts."""
    share = channel.share(num_rows)
    (*front, _, width), top_k = x_tD.shape, ids_tK.shape[-1]
    rows = channel.shape.ranks * share
    out = out or (
        x_tD.new_empty(*front, rows, width),
        ids_tK.new_empty(*front, rows, top_k, dtype=torch.int32),
        weights_tK.new_empty(*front, rows, top_k),
    )
    exchange_sharded.dispatch_kernel[channel.grid(rows)](
        x_tD, ids_tK, weights_tK, *out, *channel.pointers(squares=False),
        num_rows, share, channel.first_rank, channel.limit_ns,
        K=top_k, WIDE_K=triton.next_power_of_2(top_k), GROUP=group, EXPERTS=experts,
        SHARE=channel.shape.capacity // channel.shape.ranks, PHASES=phases, **channel.constants(),
    )  # fmt: skip
    return out


def combine(
    partial: torch.Tensor,
    local_ids_RK: torch.Tensor,
    ids_tK: torch.Tensor,
    shared_tD: torch.Tensor | None,
    residual_tD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    channel: Channel,
    num_rows: int,
    experts: int,
    group: int = 1,
    phases: int = ALL_PHASES,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, D] and this rank's residuals [t, D], from partial sums [R, D] or [S, R, D] of what `dispatch` brought."""
    share = channel.share(num_rows)
    rows, top_k = channel.shape.ranks * share, ids_tK.shape[-1]
    x_TD, new_tD = out or (
        residual_tD.new_empty(*residual_tD.shape[:-2], num_rows, residual_tD.shape[-1]),
        torch.empty_like(residual_tD),
    )
    exchange_sharded.combine_kernel[channel.grid(rows)](
        partial, local_ids_RK, ids_tK, residual_tD if shared_tD is None else shared_tD, residual_tD, weight_D,
        x_TD, new_tD, *channel.pointers(squares=False), num_rows, share, channel.first_rank, channel.limit_ns, eps,
        AT_ONCE=channel.at_once(num_rows), WIDE=channel.shape.wide, K=top_k,
        GROUP=group, EXPERTS=experts, PARTS=partial.numel() // (channel.launched * rows * channel.shape.width),
        SHARED=shared_tD is not None, CAPACITY=channel.shape.capacity, PHASES=phases, **channel.constants(),
    )  # fmt: skip
    return x_TD, new_tD


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) at K2.5's width, 8 and 2 ranks."""
    pointers = dict.fromkeys(("peers_ptr", "squares_ptr"), "*i64") | dict.fromkeys(
        ("state_ptr", "failed_ptr", "alarm_ptr", "local_ids_ptr", "ids_ptr", "out_ids_ptr"), "*i32"
    )
    rows = ("residual_ptr", "weight_ptr", "out_ptr", "new_residual_ptr", "x_ptr", "shared_ptr")
    numbers = dict.fromkeys(("num_rows", "share", "first_rank"), "i32") | {"limit_ns": "i64", "eps": "fp32"}
    known = pointers | numbers | dict.fromkeys(rows, "*bf16")
    known |= dict.fromkeys(("weights_ptr", "out_weights_ptr"), "*fp32")
    cases = []
    for ranks, parts, part_type in ((8, 4, "*fp32"), (2, 9, "*bf16")):
        constants = {
            "D": 7168, "BLOCK": 1024, "CHUNKS": 7, "WIDE": 8, "P": ranks, "PARTS": parts, "CAPACITY": 128, "MOST": 528,
            "PHASES": ALL_PHASES, "ASM": True, "PDL": capability >= (9, 0), "LOCAL": False, "K": 8, "WIDE_K": 8,
            "GROUP": 1, "EXPERTS": 384 // ranks, "SHARE": 128 // ranks, "SHARED": True, "AT_ONCE": 4,
        }  # fmt: skip
        for kernel in (
            exchange.one_shot_kernel,
            exchange.two_shot_kernel,
            exchange_sharded.dispatch_kernel,
            exchange_sharded.combine_kernel,
        ):
            signature = known | {"partial_ptr": part_type}
            arguments = {name: signature[name] for name in kernel.arg_names if name in signature}
            own = {name: value for name, value in constants.items() if name in kernel.arg_names}
            cases.append(
                (f"{kernel.__name__} {ranks}", kernel, arguments, own, {"num_warps": WARPS, "maxnreg": REGISTERS})
            )
    return cases
