"""W4A16 experts on the GPU: gate and up, SiLU, down and the weighted sum, for one row to thousands.

Up to 64 rows every row's result has the same bits whatever the other rows are: one tile shape, one split of K, one
order of additions. Twin: `engine.kernels.reference.experts` on the weights of `expanded`.

Shape letters: T rows, K experts a row, E experts here, D model width, I expert width here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from engine.kernels.gpu.device import architecture_memory, block_memory, num_processors
from engine.kernels.gpu.experts_kernels import act_kernel, down_kernel, gate_up_kernel, sum_kernel
from engine.kernels.gpu.experts_plan import BLOCK_ROWS, Plan, plan_blocks
from engine.kernels.gpu.int4 import half_of_gate_up, unpack_tiles
from engine.kernels.gpu.int4_pack import pack_into
from engine.kernels.gpu.pdl import launch_options

INVARIANT_ROWS = 64
FEWEST_ROWS = 2  # up to which starting early gains more than spreading evenly


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
    """Launches of the products. `block_rows` positions a block, 8 for those that scale each group's sum;
    `splits` parts of K in gate and up."""

    block_rows: int
    splits: int
    gate_up: Tile
    down: Tile


FEW_ROWS = Config(BLOCK_ROWS, 4, Tile(64, 4, 2, 6), Tile(128, 3, 4, 3))
SOME_ROWS = Config(BLOCK_ROWS, 2, Tile(64, 4, 2, 6), Tile(128, 3, 4, 3))
BY_ROWS = (  # to so many rows of 384 experts and 8 a row: blocks that an expert's rows fill by half or more, on average
    (INVARIANT_ROWS, FEW_ROWS),
    (384, SOME_ROWS),
    (704, Config(16, 1, Tile(128, 3, 4, 3), Tile(128, 3, 4, 4))),
    (1408, Config(32, 1, Tile(128, 4, 4, 2), Tile(128, 3, 4, 3))),
)
MANY_ROWS = Config(64, 1, Tile(256, 3, 8, 1), Tile(256, 3, 8, 1))
DOWN_OF_WIDE_EXPERTS = Tile(128, 3, 4, 4)
SMALL_SHARED_MEMORY = Tile(128, 2, 8, 1)


def choose_config(num_rows: int, width: int, expert_width: int, memory: int) -> Config:
    """By the number of rows, the experts' widths and the bytes of shared memory a block may have.

    Up to 64 rows neither `block_rows` nor `splits` depend on the rows: a result's bits depend on those.
    """
    config = next((config for most, config in BY_ROWS if num_rows <= most), MANY_ROWS)
    if config.block_rows > BLOCK_ROWS:
        little = memory < 160_000
        return replace(config, gate_up=SMALL_SHARED_MEMORY, down=SMALL_SHARED_MEMORY) if little else config
    splits = next(s for s in (config.splits, 2, 1) if width // 128 % s == 0)
    is_wide = expert_width >= 1024 and num_rows > 2
    return replace(config, splits=splits, down=DOWN_OF_WIDE_EXPERTS if is_wide else config.down)


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
    pack_into(experts.gate_up_words[index], experts.gate_up_scales[index], packed, scale, int(is_up))


def put_down(experts: PackedExperts, index: int, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Packs one down matrix of the checkpoint (int32 [D, I/8], scale [D, I/32]) into its place."""
    pack_into(experts.down_words[index], experts.down_scales[index], packed, scale)


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
    plan: Plan | None = None,
    config: Config | None = None,
    in_parts: bool = False,
) -> torch.Tensor:
    """float32 [T, D]: sum over each row's experts in order of id, plus shared_act . shared_down^T where given.

    x: bfloat16, contiguous; ids: int32, -1 = not here or a padding row, distinct in a row; weights: float32; plan: of
    these rows in blocks of BLOCK_ROWS, made here if None; shared_act: bfloat16 [T, S], shared_down: bfloat16 [D, S], S
    a multiple of 64. With `in_parts` up to 64 rows give bfloat16 [K or K + 1, T, D] instead, to be added in order;
    meant for rows whose experts are all here.
    """
    num_rows, top_k = ids_TK.shape
    if num_rows * packed.width >= 2**31:
        raise ValueError(f"{num_rows} rows of {packed.width} pass 32-bit offsets; lower max_num_batched_tokens.")
    config = config or choose_config(num_rows, packed.width, packed.expert_width, block_memory(x_TD.device))
    plan = plan or plan_blocks(ids_TK, weights_TK, packed.num_experts, config.block_rows)
    in_parts = in_parts and num_rows <= INVARIANT_ROWS
    fuse_shared = shared_act_TI is not None and num_rows <= INVARIANT_ROWS
    shape = (top_k + fuse_shared, num_rows, packed.width)
    # What `act_kernel` clears where it runs: the outputs of padding rows, which nobody writes.
    new = torch.zeros if in_parts and config.splits == 1 else torch.empty
    slots_KTD = new(shape, dtype=torch.bfloat16, device=x_TD.device)
    act = gate_up_product(x_TD, plan, packed, config, top_k)
    if config.splits > 1:
        act = silu_of_parts(act, ids_TK, plan, slots_KTD, in_parts)
    shared = (shared_act_TI, shared_down_DI) if fuse_shared else ()
    down_product(act, plan, packed, config, slots_KTD, ids_TK, *shared)
    if in_parts:
        return slots_KTD
    if fuse_shared or shared_act_TI is None:
        return sum_slots(ids_TK, slots_KTD, slots_KTD[top_k] if fuse_shared else None)
    return sum_slots(ids_TK, slots_KTD, torch.mm(shared_act_TI, shared_down_DI.t()))


def _grid(tile: Tile, items: int, device: torch.device) -> tuple[int]:
    return (max(1, min(items, tile.programs * num_processors(device))),)


def gate_up_product(x_TD: torch.Tensor, plan: Plan, packed: PackedExperts, config: Config, top_k: int) -> torch.Tensor:
    """Parts float32 [splits, T * K, 2I] of gate and up, interleaved; without a split act bfloat16 [T * K, I]:
    weight * silu(gate) * up by slot. Slots that are nobody's stay unwritten."""
    tile, splits, device = config.gate_up, config.splits, x_TD.device
    num_slots, expert_width = plan.slot_weights.numel(), packed.expert_width
    if splits > 1:
        out = torch.empty(splits, num_slots, 2 * expert_width, dtype=torch.float32, device=device)
    else:
        out = torch.empty(num_slots, expert_width, dtype=torch.bfloat16, device=device)
    blocks = plan.block_experts.numel()
    items = blocks * (2 * expert_width // tile.rows) * splits
    gate_up_kernel[_grid(tile, items, device)](
        x_TD, packed.gate_up_words, packed.gate_up_scales, plan.block_experts, plan.block_sizes, plan.rows,
        plan.slot_weights, plan.num_blocks, out, out, num_slots, blocks - 1,
        TOP_K=top_k, D=packed.width, INNER=expert_width, BN=tile.rows, ROWS=config.block_rows, SPLITS=splits,
        GROUPED=config.block_rows == BLOCK_ROWS, STAGES=tile.stages, ASM=device.type == "cuda", num_warps=tile.warps,
        **launch_options(device, evenly=x_TD.shape[0] > FEWEST_ROWS),
    )  # fmt: skip
    return out


def silu_of_parts(
    partial: torch.Tensor, ids_TK: torch.Tensor, plan: Plan, slots_KTD: torch.Tensor, clear: bool
) -> torch.Tensor:
    """act bfloat16 [T * K, I] of the parts of gate and up; with `clear` zeroes slots_KTD where there is no expert."""
    (splits, num_slots, twice), (num_rows, top_k) = partial.shape, ids_TK.shape
    inner = twice // 2
    act = torch.empty(num_slots, inner, dtype=torch.bfloat16, device=partial.device)
    block = 256 if inner % 256 == 0 else 128
    act_kernel[(num_slots, inner // block)](
        partial, ids_TK, plan.slot_weights, act, slots_KTD, num_rows,
        TOP_K=top_k, D=slots_KTD.shape[2], INNER=inner, SPLITS=splits, CLEAR=clear, BLOCK=block, num_warps=2,
        **launch_options(partial.device),
    )  # fmt: skip
    return act


def down_product(
    act: torch.Tensor, plan: Plan, packed: PackedExperts, config: Config, slots_KTD: torch.Tensor, ids_TK: torch.Tensor,
    shared_act_TI: torch.Tensor | None = None, shared_down_DI: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes each slot's down product, and behind them the shared expert's, to slots_KTD [K or K + 1, T, D]."""
    tile, device, width = config.down, act.device, packed.width
    (num_rows, top_k), blocks = ids_TK.shape, plan.block_experts.numel()
    has_shared = shared_act_TI is not None
    pointers = (shared_act_TI, shared_down_DI) if has_shared else (act, act)  # stand-ins that nothing reads
    down_kernel[_grid(tile, (blocks + 4 * has_shared) * (width // tile.rows), device)](
        act, packed.down_words, packed.down_scales, plan.block_experts, plan.block_sizes, plan.rows, plan.num_blocks,
        *pointers, slots_KTD, num_rows, blocks - 1,
        TOP_K=top_k, D=width, INNER=packed.expert_width, SHARED_INNER=shared_act_TI.shape[1] if has_shared else 0,
        SHARED_ROWS=max(16, triton.next_power_of_2(num_rows)) if has_shared else 16, BN=tile.rows,
        ROWS=config.block_rows, GROUPED=config.block_rows == BLOCK_ROWS, STAGES=tile.stages, ASM=device.type == "cuda",
        num_warps=tile.warps, **launch_options(device, evenly=num_rows > FEWEST_ROWS),
    )  # fmt: skip


def sum_slots(ids_TK: torch.Tensor, slots_KTD: torch.Tensor, shared_TD: torch.Tensor | None) -> torch.Tensor:
    """float32 [T, D]: each row's slots in order, then the shared expert's output."""
    (num_rows, top_k), width = ids_TK.shape, slots_KTD.shape[2]
    out = torch.empty(num_rows, width, dtype=torch.float32, device=slots_KTD.device)
    block = 1024
    sum_kernel[(num_rows, triton.cdiv(width, block))](
        ids_TK, slots_KTD, shared_TD, out, num_rows,
        TOP_K=top_k, D=width, SHARED=shared_TD is not None, BLOCK=block, **launch_options(slots_KTD.device),
    )  # fmt: skip
    return out


_SIGNATURE = {
    "x_ptr": "*bf16", "words_ptr": "*i16", "scales_ptr": "*bf16", "block_experts_ptr": "*i32",
    "block_sizes_ptr": "*i32", "rows_ptr": "*i32", "slot_weights_ptr": "*fp32", "num_blocks_ptr": "*i32",
    "partial_ptr": "*fp32", "act_ptr": "*bf16", "num_slots": "i32", "num_rows": "i32", "last_block": "i32",
    "shared_act_ptr": "*bf16", "shared_ptr": "*bf16", "slot_ptr": "*bf16", "down_ptr": "*bf16", "out_ptr": "*fp32",
    "ids_ptr": "*i32",
}  # fmt: skip


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the kernels for K2.5's slices and whole experts."""
    pdl = capability >= (9, 0)
    cases = []
    for inner, rows in ((256, 1), (256, 16), (2048, 16), (256, 256), (256, 512), (256, 1024), (256, 2048)):
        config = choose_config(rows, 7168, inner, architecture_memory(capability))
        grouped = config.block_rows == BLOCK_ROWS
        shape = {"TOP_K": 8, "D": 7168, "INNER": inner, "PDL": pdl}
        shared = {"SHARED_INNER": 256 if rows <= INVARIANT_ROWS else 0, "SHARED_ROWS": max(16, min(rows, 64))}
        for kernel, tile, more in (
            (gate_up_kernel, config.gate_up, {"SPLITS": config.splits}),
            (down_kernel, config.down, shared),
        ):
            constants = shape | more | {"BN": tile.rows, "STAGES": tile.stages, "ROWS": config.block_rows}
            constants |= {"GROUPED": grouped, "ASM": True}
            cases.append(_case(f"{kernel.__name__} {inner} {rows}", kernel, constants, tile.warps))
        if config.splits > 1:
            constants = shape | {"SPLITS": config.splits, "CLEAR": rows <= INVARIANT_ROWS, "BLOCK": 256}
            cases.append(_case(f"act_kernel {inner} {rows}", act_kernel, constants, 2))
    constants = {"TOP_K": 8, "D": 7168, "SHARED": True, "BLOCK": 1024, "PDL": pdl}
    cases.append(_case("sum_kernel", sum_kernel, constants, 4, {"out_ptr": "*fp32"}))
    return cases


def _case(name: str, kernel, constants: dict, warps: int, signature: dict | None = None) -> tuple:
    signature = _SIGNATURE | (signature or {})
    arguments = {argument: signature[argument] for argument in kernel.arg_names if argument not in constants}
    return name, kernel, arguments, constants, {"num_warps": warps}
