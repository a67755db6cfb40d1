"""W4A16 experts on the GPU: gate and up, SiLU, down and the weighted sum, for one row to thousands.

Up to 64 rows every row's result has the same bits whatever the other rows are: one tile shape, one split of K, one
order of additions. Twin: `engine.kernels.reference.experts` on the weights of `expanded`.

Shape letters: T rows, K experts a row, E experts here, D model width, I expert width here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from engine.kernels.gpu.experts_kernels import (
    down_kernel,
    down_stream_kernel,
    down_sum_kernel,
    gate_up_kernel,
    sum_kernel,
)
from engine.kernels.gpu.experts_plan import Plan, plan_blocks
from engine.kernels.gpu.int4 import half_of_gate_up, pack_int4, unpack_tiles
from engine.kernels.gpu.pdl import launch_options

INVARIANT_ROWS = 64


@dataclass(frozen=True)
class PackedExperts:
    """Tiles of all experts: gate_up interleaved [2I, D] and down [D, I], as `pack_int4` lays them out, stacked."""

    gate_up_words: torch.Tensor
    gate_up_scales: torch.Tensor
    down_words: torch.Tensor
    down_scales: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.gate_up_words.shape[0]

    @property
    def width(self) -> int:
        return self.down_words.shape[1] * 64

    @property
    def expert_width(self) -> int:
        return self.down_words.shape[2] * 128


@dataclass(frozen=True)
class Tile:
    """One kernel's launch: weight rows a program, pipeline stages, warps, programs a multiprocessor."""

    rows: int
    stages: int
    warps: int
    programs: int


@dataclass(frozen=True)
class Config:
    """Launches of the products. `block_rows` positions a block; `splits` parts of K in gate and up.

    `stream` groups of blocks a tile where down runs as a stream, 0 where it runs over items; `fuse_sum` is the most
    rows for which down also sums, at most `block_rows`.
    """

    block_rows: int
    splits: int
    gate_up: Tile
    down: Tile
    down_sum: Tile
    stream: int
    fuse_sum: int


FEW_ROWS = Config(16, 4, Tile(64, 5, 4, 4), Tile(64, 7, 4, 4), Tile(64, 13, 4, 1), 7, 16)
SOME_ROWS = Config(64, 1, Tile(128, 3, 8, 1), Tile(128, 3, 8, 1), Tile(64, 13, 4, 1), 0, 0)
MANY_ROWS = Config(128, 1, Tile(128, 3, 8, 1), Tile(128, 3, 8, 1), Tile(64, 13, 4, 1), 0, 0)
SMALL_SHARED_MEMORY = {"gate_up": Tile(128, 2, 8, 1), "down": Tile(128, 2, 8, 1)}
LONGEST_STREAMED_WIDTH = 512


def choose_config(num_rows: int, width: int, expert_width: int, block_memory: int) -> Config:
    """By the number of rows and the bytes of shared memory a block may have: with little, fewer stages and rows."""
    if num_rows <= INVARIANT_ROWS:
        splits = next(s for s in (4, 2, 1) if width // 128 % s == 0)
        return replace(FEW_ROWS, splits=splits, stream=FEW_ROWS.stream * (expert_width <= LONGEST_STREAMED_WIDTH))
    if block_memory < 160_000:
        return replace(SOME_ROWS, **SMALL_SHARED_MEMORY)
    return SOME_ROWS if num_rows <= 1024 else MANY_ROWS


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes a block may have; plenty where there is no GPU."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """One where there is no GPU: the interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def empty_experts(num_experts: int, width: int, expert_width: int, device: torch.device) -> PackedExperts:
    """Room for the tiles of experts whose width is a multiple of 128; `put_*` fills it."""
    if width % 128 or expert_width % 128:
        raise ValueError(
            f"packed experts need widths that are multiples of 128, not {width} x {expert_width}; "
            "use the float storage or fewer ranks a slice."
        )

    def tiles(rows: int, columns: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_experts, rows // 64, columns // 128, 64, last, dtype=dtype, device=device)

    return PackedExperts(
        tiles(2 * expert_width, width, 32, torch.int16),
        tiles(2 * expert_width, width, 4, torch.bfloat16),
        tiles(width, expert_width, 32, torch.int16),
        tiles(width, expert_width, 4, torch.bfloat16),
    )


def put_gate_or_up(experts: PackedExperts, index: int, is_up: bool, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Packs one gate or up matrix of the checkpoint (int32 [I, D/8], scale [I, D/32]) into its place."""
    device = experts.gate_up_words.device
    tiles = pack_int4(packed.to(device), scale.to(device), 32)
    for target, value in zip((experts.gate_up_words, experts.gate_up_scales), tiles, strict=True):
        half_of_gate_up(target[index], is_up).copy_(value.unflatten(2, (4, 8)))


def put_down(experts: PackedExperts, index: int, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Packs one down matrix of the checkpoint (int32 [D, I/8], scale [D, I/32]) into its place."""
    device = experts.down_words.device
    words, scales = pack_int4(packed.to(device), scale.to(device))
    experts.down_words[index].copy_(words)
    experts.down_scales[index].copy_(scales)


def expanded(packed: PackedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """The bfloat16 matrices that the kernels multiply by: gate_up [E, 2I, D], gate rows first, and down [E, D, I]."""
    gate_up, down = [], []
    for expert in range(packed.num_experts):
        words, scales = packed.gate_up_words[expert], packed.gate_up_scales[expert]
        halves = (
            unpack_tiles(half_of_gate_up(words, is_up).flatten(2, 3), half_of_gate_up(scales, is_up).flatten(2, 3))
            for is_up in (False, True)
        )
        gate_up.append(torch.cat(tuple(halves)))
        down.append(unpack_tiles(packed.down_words[expert], packed.down_scales[expert]))
    return torch.stack(gate_up), torch.stack(down)


def int4_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    packed: PackedExperts,
    shared_act_TI: torch.Tensor | None = None,
    shared_down_DI: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """float32 [T, D]: sum over each row's experts in order of id, plus shared_act . shared_down^T where given.

    x: bfloat16, contiguous; ids: int32, -1 = not here or a padding row, distinct in a row; weights: float32;
    shared_act: bfloat16 [T, S], shared_down: bfloat16 [D, S], S a multiple of 64.
    """
    config = config or choose_config(x_TD.shape[0], packed.width, packed.expert_width, shared_memory(x_TD.device))
    tiles = 2 * packed.expert_width // config.gate_up.rows
    plan = plan_blocks(ids_TK, weights_TK, packed.num_experts, config.block_rows, tiles)
    act = gate_up_product(x_TD, plan, packed, config, ids_TK.shape[1])
    num_rows = x_TD.shape[0]
    if num_rows <= config.fuse_sum:
        return down_sum(act, plan, packed, config, num_rows, shared_act_TI, shared_down_DI)
    if num_rows <= INVARIANT_ROWS:
        slots, shared = down_product(act, plan, packed, config, num_rows, shared_act_TI, shared_down_DI)
    else:
        slots, _ = down_product(act, plan, packed, config, num_rows, None, None)
        shared = None if shared_act_TI is None else torch.mm(shared_act_TI, shared_down_DI.t())
    return sum_slots(ids_TK, slots, shared)


def _grid(tile: Tile, items: int, device: torch.device) -> tuple[int]:
    return (max(1, min(items, tile.programs * num_multiprocessors(device))),)


def gate_up_product(x_TD: torch.Tensor, plan: Plan, packed: PackedExperts, config: Config, top_k: int) -> torch.Tensor:
    """act bfloat16 [T * K, I] by slot: weight * silu(gate) * up. Slots that are nobody's stay unwritten."""
    tile, splits, device = config.gate_up, config.splits, x_TD.device
    width, expert_width = packed.width, packed.expert_width
    num_slots = plan.slot_weights.numel()
    act = torch.empty(num_slots, expert_width, dtype=torch.bfloat16, device=device)
    partial_shape = (splits, num_slots, 2 * expert_width) if splits > 1 else (1,)
    partial = torch.empty(partial_shape, dtype=torch.float32, device=device)
    items = plan.block_experts.numel() * (2 * expert_width // tile.rows) * splits
    gate_up_kernel[_grid(tile, items, device)](
        x_TD, packed.gate_up_words, packed.gate_up_scales, plan.block_experts, plan.rows, plan.slot_weights,
        plan.num_blocks, plan.counters, partial, act, num_slots,
        TOP_K=top_k, D=width, INNER=expert_width, BN=tile.rows, ROWS=config.block_rows, SPLITS=splits,
        STAGES=tile.stages, ASM=device.type == "cuda", num_warps=tile.warps, **launch_options(device),
    )  # fmt: skip
    return act


def down_product(
    act: torch.Tensor, plan: Plan, packed: PackedExperts, config: Config, num_rows: int,
    shared_act_TI: torch.Tensor | None, shared_down_DI: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Each slot's down product [T * K, D] (float32 up to 64 rows, else bfloat16) and the shared expert's [T, D]."""
    tile, device, width = config.down, act.device, packed.width
    dtype = torch.float32 if num_rows <= INVARIANT_ROWS else torch.bfloat16
    slots = torch.empty(act.shape[0], width, dtype=dtype, device=device)
    shared = None
    if shared_act_TI is not None:
        shared = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    items = (plan.block_experts.numel() + triton.cdiv(num_rows, config.block_rows)) * (width // tile.rows)
    kernel = down_stream_kernel if config.stream else down_kernel
    grid = (width // tile.rows, config.stream) if config.stream else _grid(tile, items, device)
    kernel[grid](
        act, packed.down_words, packed.down_scales, plan.block_experts, plan.rows, plan.num_blocks,
        *_given(act, shared_act_TI, shared_down_DI), slots, *_given(slots, shared), num_rows,
        D=width, INNER=packed.expert_width, SHARED_INNER=_shared_width(shared_act_TI), BN=tile.rows,
        ROWS=config.block_rows, STAGES=tile.stages, ASM=device.type == "cuda", num_warps=tile.warps,
        **launch_options(device),
    )  # fmt: skip
    return slots, shared


def _given(stand_in: torch.Tensor, *tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Pointers for a kernel: it is compiled for no shared expert, but names must have a type there too."""
    return [stand_in if tensor is None else tensor for tensor in tensors]


def down_sum(
    act: torch.Tensor, plan: Plan, packed: PackedExperts, config: Config, num_rows: int,
    shared_act_TI: torch.Tensor | None, shared_down_DI: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """float32 [T, D]: down products and their sum at once, for at most one block of rows."""
    tile, device, width = config.down_sum, act.device, packed.width
    out = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    down_sum_kernel[(width // tile.rows,)](
        act, packed.down_words, packed.down_scales, plan.block_experts, plan.rows, plan.num_blocks,
        *_given(act, shared_act_TI, shared_down_DI), out, num_rows,
        D=width, INNER=packed.expert_width, SHARED_INNER=_shared_width(shared_act_TI), BN=tile.rows,
        ROWS=config.block_rows, STAGES=tile.stages, ASM=device.type == "cuda", num_warps=tile.warps,
        **launch_options(device),
    )  # fmt: skip
    return out


def sum_slots(ids_TK: torch.Tensor, slots: torch.Tensor, shared_TD: torch.Tensor | None) -> torch.Tensor:
    """float32 [T, D]: each row's slots in order, then the shared expert's output."""
    (num_rows, top_k), width = ids_TK.shape, slots.shape[1]
    out = torch.empty(num_rows, width, dtype=torch.float32, device=slots.device)
    block = 1024
    sum_kernel[(num_rows, triton.cdiv(width, block))](
        ids_TK, slots, shared_TD, out,
        TOP_K=top_k, D=width, SHARED=shared_TD is not None, BLOCK=block, **launch_options(slots.device),
    )  # fmt: skip
    return out


def _shared_width(shared_act_TI: torch.Tensor | None) -> int:
    return 0 if shared_act_TI is None else shared_act_TI.shape[1]


_SIGNATURE = {
    "x_ptr": "*bf16", "words_ptr": "*i16", "scales_ptr": "*bf16", "block_experts_ptr": "*i32", "rows_ptr": "*i32",
    "slot_weights_ptr": "*fp32", "num_blocks_ptr": "*i32", "counters_ptr": "*i32", "partial_ptr": "*fp32",
    "act_ptr": "*bf16", "num_slots": "i32", "num_rows": "i32", "shared_act_ptr": "*bf16", "shared_ptr": "*bf16",
    "slot_ptr": "*fp32", "shared_out_ptr": "*fp32", "out_ptr": "*fp32", "ids_ptr": "*i32",
}  # fmt: skip


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the products of K2.5's slices and whole experts."""
    block_memory = 227 * 1024 if capability[0] in (9, 10) else 99 * 1024
    pdl = capability >= (9, 0)
    cases = []
    for inner, rows in ((256, 16), (2048, 16), (256, 2048)):
        config = choose_config(rows, 7168, inner, block_memory)
        shape = {"D": 7168, "INNER": inner, "ROWS": config.block_rows, "ASM": True, "PDL": pdl}
        shared = {"SHARED_INNER": 256 if rows <= INVARIANT_ROWS else 0}
        launches = [
            (gate_up_kernel, config.gate_up, {"TOP_K": 8, "SPLITS": config.splits}),
            (down_stream_kernel if config.stream else down_kernel, config.down, shared),
        ]
        if config.fuse_sum:
            launches.append((down_sum_kernel, config.down_sum, shared))
        for kernel, tile, more in launches:
            constants = shape | more | {"BN": tile.rows, "STAGES": tile.stages}
            cases.append(_case(f"{kernel.__name__} {inner} {rows}", kernel, constants, tile.warps))
    constants = {"TOP_K": 8, "D": 7168, "SHARED": True, "BLOCK": 1024, "PDL": pdl}
    cases.append(_case("sum_kernel", sum_kernel, constants, 4, {"shared_ptr": "*fp32"}))
    return cases


def _case(name: str, kernel, constants: dict, warps: int, signature: dict | None = None) -> tuple:
    signature = _SIGNATURE | (signature or {})
    arguments = {argument: signature[argument] for argument in kernel.arg_names if argument not in constants}
    return name, kernel, arguments, constants, {"num_warps": warps}
