"""The epilogue form of a round: a product whose programs send their finished tiles to all ranks, and a second kernel
that waits for the tiles, adds them up, and may meanwhile fetch the next product's weight into the cache.

An experiment beside `channel.one_shot` after a product, with the same bits: a rank's partial is rounded once, the sum
over ranks is float32 in their order. The two share a channel; a pair of launches counts as one call.

Shape letters: V ranks of this launch, P ranks, T rows, D width of a row, I inputs of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl, peer
from engine.kernels.gpu.channel import REGISTERS, WARPS, Channel
from engine.kernels.gpu.dense import MAX_ROWS, Tile, fitted, head_of, product, tile_rows
from engine.kernels.gpu.device import architecture_memory, block_memory
from engine.kernels.gpu.exchange import norm_rows, sum_rows
from engine.kernels.gpu.peer import ALL_PHASES, NORM, SETS, SUM

# Half of a plain product's outputs: its inputs are never split, so that only this makes programs for all processors.
TILE = Tile(block_o=32)
LANES, PIECE = tl.constexpr(128), tl.constexpr(1024)  # fetches of a program at a time, bytes of each
FETCH = tl.constexpr(
    "{ .reg .pred any; setp.gt.s32 any, $2, 0; @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit(do_not_specialize=["num_rows", "first_rank"])
def push_linear_kernel(
    x_ptr, w_ptr, out_ptr, peers_ptr, state_ptr, num_rows, first_rank,
    D: tl.constexpr, IN: tl.constexpr, P: tl.constexpr, CAPACITY: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, HEAD: tl.constexpr,
    SEND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tile program_id(0) of rank first_rank + program_id(1): x [V, T, I] . w [V, D, I]^T, to the places of this call in
    all ranks' memory [SETS, P senders, CAPACITY, D]; or to out [V, T, D], unless SEND. Waits for no rank."""
    v = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    d = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = tl.arange(0, ROWS)
    w_rows = w_ptr + (v * D + tl.minimum(d, D - 1)) * IN
    x_rows = x_ptr + (v * num_rows + t[:, None]) * IN
    is_row = (t < num_rows)[:, None]
    w_head = tl.load(w_rows[:, None] + tl.arange(0, HEAD)[None, :])
    peers = peer.addresses(peers_ptr + v * P, P)
    pdl.wait(PDL)
    calls = tl.load(state_ptr + v * 2 * MOST)  # the same for all programs, between two calls
    acc = product(x_rows, w_rows, w_head, is_row, IN, ROWS, BLOCK_O, BLOCK_I, STAGES)
    rows = tl.trans(acc)
    inside = is_row & (d < D)[None, :]
    place = t[:, None].to(tl.int64) * D + d[None, :]
    if SEND:
        sender = (peer.set_of(calls) * P + first_rank + v) * CAPACITY * D
        peer.send_to_all(peers, sender + place, rows, inside, P, dtype)
    else:
        tl.store(out_ptr + v * num_rows * D + place, rows.to(dtype), mask=inside)


@triton.jit
def fetch(pointer, num_bytes):
    """This program's part of num_bytes, a multiple of 16, on its way into the cache; nothing waits for it."""
    stride = tl.num_programs(0) * LANES * PIECE
    for first in range(tl.program_id(0) * LANES * PIECE, num_bytes, stride):
        at = first + tl.arange(0, LANES) * PIECE
        size = tl.minimum(tl.maximum(num_bytes - at, 0), PIECE)
        tl.inline_asm_elementwise(
            FETCH, "=r,l,r", [pointer.to(tl.int64) + at, size], tl.int32, is_pure=False, pack=1
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "first_rank", "limit_ns", "next_bytes"],
    do_not_specialize_on_alignment=["failed_ptr", "alarm_ptr"],
)
def receive_kernel(
    next_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr,
    peers_ptr, squares_ptr, state_ptr, failed_ptr, alarm_ptr, next_bytes, num_rows, first_rank, limit_ns, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr,
    CAPACITY: tl.constexpr, MOST: tl.constexpr, FETCHES: tl.constexpr, EARLY: tl.constexpr, PHASES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The half of `exchange.one_shot_kernel` that follows its sending, for rows that the kernel before this one sends.

    EARLY: does not wait for that kernel's end, only for its rows. When this one runs, all programs of the one before
    are past their own wait, so that whatever came before is there; the caller sees to it that what this one writes is
    not what the other reads.
    """
    v = tl.program_id(1).to(tl.int64)
    rank = first_rank + v
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    peers_ptr, state_ptr, failed_ptr, alarm_ptr = peer.of_rank(v, peers_ptr, state_ptr, failed_ptr, alarm_ptr, P, MOST)
    whole = v * num_rows * D
    residual_ptr, out_ptr, new_residual_ptr = residual_ptr + whole, out_ptr + whole, new_residual_ptr + whole
    squares_ptr += v * CAPACITY * WIDE
    chunk, first, step = peer.portion(CHUNKS)
    d = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = d < D
    stride: tl.constexpr = CAPACITY * D
    mine = peer.rows_at(peer.pick(peer.addresses(peers_ptr, P), rank, P), dtype)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0)
    alarms = peer.each(alarm_ptr, P)
    if FETCHES:
        fetch(next_ptr.to(tl.int64) + v * next_bytes, next_bytes)
    if not EARLY:
        pdl.wait(PDL)
    calls, rows_before = peer.calls_so_far(state_ptr, MOST)
    if SUM & PHASES:
        before = peer.set_of(calls + SETS - 1) * P * stride
        for i in range(first, rows_before, step):
            peer.put_marks(mine + before, stride, peer.wide(i), d, inside, P, D, dtype)
        sum_rows(
            mine + peer.set_of(calls) * P * stride, residual_ptr, new_residual_ptr, squares_ptr, calls, num_rows,
            chunk, first, step, d, inside, failed_ptr, alarms, limit_ns, D, WIDE, P, stride, ASM,
        )  # fmt: skip
    if EARLY:
        pdl.wait(PDL)
    if NORM & PHASES:
        norm_rows(
            new_residual_ptr, out_ptr, weight, squares_ptr, calls, num_rows, first, step, d, inside,
            failed_ptr, alarm_ptr + rank, limit_ns, eps, D, CHUNKS, WIDE, ASM,
        )  # fmt: skip
        peer.count_call(state_ptr, calls, num_rows, MOST, 128)


def push_linear(
    x_TI: torch.Tensor,
    weight_DI: torch.Tensor,
    channel: Channel,
    tile: Tile = TILE,
    out_TD: torch.Tensor | None = None,
) -> None:
    """Sends x . weight^T, rounded to the channel's type, to all ranks, for the `receive` that must follow; or writes it
    to out_TD and sends nothing. With V ranks in a launch all have V in front.

    Raises ValueError for a product that is not of the channel's width and type, or of more rows than it takes.
    """
    (outputs, inputs), num_rows, shape = weight_DI.shape[-2:], x_TI.shape[-2], channel.shape
    most = min(MAX_ROWS, shape.capacity)
    if outputs != shape.width or not x_TI.dtype == weight_DI.dtype == shape.dtype or num_rows > most:
        raise ValueError(
            f"a product of {num_rows} rows, {outputs} wide, of {weight_DI.dtype} cannot be sent; the channel takes up "
            f"to {most} rows, {shape.width} wide, of {shape.dtype}."
        )
    rows = tile_rows(num_rows)
    tile = fitted(tile, rows, block_memory(x_TI.device))
    push_linear_kernel[(triton.cdiv(outputs, tile.block_o), channel.launched)](
        x_TI, weight_DI, x_TI if out_TD is None else out_TD, channel.addresses_VP, channel.state,
        num_rows, channel.first_rank,
        D=outputs, IN=inputs, P=shape.ranks, CAPACITY=shape.capacity, MOST=channel.state.shape[2],
        SEND=out_TD is None, num_warps=tile.warps, **_tiling(tile, rows, inputs), **pdl.launch_options(x_TI.device),
    )  # fmt: skip


def _tiling(tile: Tile, rows: int, inputs: int) -> dict[str, int]:
    head = head_of(tile.head, inputs)
    return {
        "ROWS": rows, "BLOCK_O": tile.block_o, "BLOCK_I": tile.block_i, "STAGES": tile.stages, "HEAD": head,
    }  # fmt: skip


def receive(
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    channel: Channel,
    next_weight: torch.Tensor | None = None,
    early: bool = False,
    phases: int = ALL_PHASES,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm of residual + sum over ranks, residual + sum) of the rows that `push_linear` has just sent.

    next_weight: what to fetch into the cache meanwhile, [V, ...], a multiple of 16 bytes for each rank; on GPUs of
    compute capability 9.0 and later. early: see `receive_kernel`; `out` must then be older than the product's launch.
    """
    x_TD, new_TD = out or (torch.empty_like(residual_TD), torch.empty_like(residual_TD))
    num_rows, constants = residual_TD.shape[-2], channel.constants()
    next_bytes = 0 if next_weight is None else next_weight.nbytes // channel.launched
    receive_kernel[channel.grid(num_rows)](
        weight_D if next_weight is None else next_weight, residual_TD, weight_D, x_TD, new_TD, *channel.pointers(),
        next_bytes, num_rows, channel.first_rank, channel.limit_ns, eps, WIDE=channel.shape.wide,
        CAPACITY=channel.shape.capacity, FETCHES=next_bytes > 0 and constants["PDL"], EARLY=early, PHASES=phases,
        **constants,
    )  # fmt: skip
    return x_TD, new_TD


def product_and_round(
    x_TI: torch.Tensor,
    weight_DI: torch.Tensor,
    residual_TD: torch.Tensor,
    norm_weight_D: torch.Tensor,
    eps: float,
    channel: Channel,
    next_weight: torch.Tensor | None = None,
    early: bool = False,
    tile: Tile = TILE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves: (RMSNorm of residual + sum, residual + sum) of the sum over ranks of x . weight^T."""
    out = torch.empty_like(residual_TD), torch.empty_like(residual_TD)  # before the launch that reads x: see `early`
    push_linear(x_TI, weight_DI, channel, tile)
    return receive(residual_TD, norm_weight_D, eps, channel, next_weight, early, out=out)


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) at K2.5's width, for 8 ranks' slices of its products."""
    pointers = {"peers_ptr": "*i64", "state_ptr": "*i32", "num_rows": "i32", "first_rank": "i32"}
    rows = ("x_ptr", "w_ptr", "next_ptr", "residual_ptr", "weight_ptr", "out_ptr", "new_residual_ptr")
    known = pointers | dict.fromkeys(rows, "*bf16") | {"squares_ptr": "*i64", "failed_ptr": "*i32", "alarm_ptr": "*i32"}
    known |= {"next_bytes": "i32", "limit_ns": "i64", "eps": "fp32"}
    shared = {"D": 7168, "P": 8, "CAPACITY": 64, "MOST": 528, "PDL": capability >= (9, 0)}

    def case(name: str, kernel, constants: dict, options: dict) -> tuple:
        signature = {argument: known[argument] for argument in kernel.arg_names if argument in known}
        return name, kernel, signature, shared | constants, options

    cases = []
    for inputs, num_rows in ((256, 16), (1024, 64), (2304, 16)):
        tile = fitted(TILE, num_rows, architecture_memory(capability))
        constants = {"IN": inputs, "SEND": True} | _tiling(tile, num_rows, inputs)
        cases.append(
            case(f"push_linear {inputs}, {num_rows} rows", push_linear_kernel, constants, {"num_warps": tile.warps})
        )
    options = {"num_warps": WARPS, "maxnreg": REGISTERS}
    receiving = {"BLOCK": 1024, "CHUNKS": 7, "WIDE": 8, "PHASES": ALL_PHASES, "ASM": True}
    for early in (False, True):
        constants = receiving | {"FETCHES": early and capability >= (9, 0), "EARLY": early}
        cases.append(case(f"receive{' early' * early}", receive_kernel, constants, options))
    return cases
