"""Products of the routed experts: gate and up, SiLU, down, and the sum over a row's experts.

Work items are (block of rows, tile of weight rows, part of K); programs are persistent and read the number of blocks
from the device, so time does not depend on how many blocks there could be. A row's result has one order of additions
whatever the other rows are.

A slot (row t, rank k) has its down product at [k, t] of an array [K, T, D], so that the ranks are the parts of a sum.
Positions of a block beyond its size read row 0 and are not stored: the matrix units keep columns apart.

Letters: D model width, INNER expert width here, BN weight rows a program, ROWS positions a block,
SPLITS parts of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.int4 import grouped_step, int4_product, multiply, tile_offsets
from engine.kernels.gpu.pdl import wait


@triton.jit
def _block(block_experts_ptr, block_sizes_ptr, rows_ptr, block, last_block, ROWS: tl.constexpr):
    """(expert int64, slots [ROWS], which are kept); beyond the last block the last, to be asked for ahead of time."""
    block = tl.minimum(block, last_block)
    r = tl.arange(0, ROWS)
    slots = tl.load(rows_ptr + block * ROWS + r)
    keep = r < tl.load(block_sizes_ptr + block)
    return tl.load(block_experts_ptr + block).to(tl.int64), tl.where(keep, slots, 0), keep


@triton.jit(do_not_specialize=["num_slots", "last_block"])
def gate_up_kernel(
    x_ptr, words_ptr, scales_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr,
    partial_ptr, act_ptr, num_slots, last_block,
    TOP_K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, GROUPED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """With SPLITS > 1 the parts float32 [SPLITS, slots, 2I] for `act_kernel`; otherwise act itself.

    Rows of gate and up alternate in eights (see `half_of_gate_up`).
    """
    wait(PDL)
    K_BLOCKS: tl.constexpr = D // 128
    TILES: tl.constexpr = 2 * INNER // BN
    num_items = tl.load(num_blocks_ptr) * (TILES * SPLITS)
    stride = num_slots.to(tl.int64) * (2 * INNER)
    block = tl.program_id(0) // (SPLITS * TILES)
    expert, slots, keep = _block(block_experts_ptr, block_sizes_ptr, rows_ptr, block, last_block, ROWS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # Asked for now, so that the next item does not wait for them.
        block = (item + tl.num_programs(0)) // (SPLITS * TILES)
        next_expert, next_slots, next_keep = _block(
            block_experts_ptr, block_sizes_ptr, rows_ptr, block, last_block, ROWS
        )
        part = item % SPLITS
        tile = (item // SPLITS) % TILES
        first_row = expert * (2 * INNER) + tile * BN
        acc = int4_product(
            words_ptr + first_row * (D // 4), scales_ptr + first_row * (D // 32), x_ptr, slots // TOP_K * D,
            part * (K_BLOCKS // SPLITS), K_BLOCKS, K_BLOCKS // SPLITS, BN, ROWS, STAGES, GROUPED, ASM,
        )  # fmt: skip
        if SPLITS > 1:
            n = tile * BN + tl.arange(0, BN)
            partial = partial_ptr + part * stride + slots[None, :].to(tl.int64) * (2 * INNER) + n[:, None]
            tl.store(partial, acc, mask=keep[None, :])
        else:
            weights = tl.load(slot_weights_ptr + slots, mask=keep, other=0.0)
            _store_act(acc, weights, slots, keep, act_ptr, tile, INNER, BN, ROWS)
        expert, slots, keep = next_expert, next_slots, next_keep


@triton.jit
def _weighted_silu(gate, up, weights):
    return (gate / (1.0 + tl.exp(-gate)) * up * weights).to(tl.bfloat16)


@triton.jit
def _store_act(acc, weights, slots, keep, act_ptr, tile, INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    HALF: tl.constexpr = BN // 2
    pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, ROWS)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    act = _weighted_silu(tl.reshape(gate, (HALF, ROWS)), tl.reshape(up, (HALF, ROWS)), weights[None, :])
    offsets = slots[None, :].to(tl.int64) * INNER + (tile * HALF + tl.arange(0, HALF))[:, None]
    tl.store(act_ptr + offsets, act, mask=keep[None, :])


@triton.jit
def count_here(ids_ptr, row, TOP_K: tl.constexpr):
    """How many of a row's experts are here."""
    count = 0
    for k in tl.static_range(TOP_K):
        count += (tl.load(ids_ptr + row * TOP_K + k) >= 0).to(tl.int32)
    return count


@triton.jit(do_not_specialize=["num_rows"])
def act_kernel(
    partial_ptr, ids_ptr, slot_weights_ptr, act_ptr, down_ptr, num_rows,
    TOP_K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr, CLEAR: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act[slot, i] = bf16(weight * silu(gate) * up), the parts added in order of K, float32 up to the one rounding.

    Program (slot, c): BLOCK columns. With CLEAR it zeroes the down product of a slot that is nobody's.
    """
    wait(PDL)
    slot = tl.program_id(0)
    row, rank = slot // TOP_K, slot % TOP_K
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(slot_weights_ptr + slot)
    if rank < count_here(ids_ptr, row, TOP_K):
        gate_at = partial_ptr + slot.to(tl.int64) * (2 * INNER) + i // 8 * 16 + i % 8
        stride = num_rows.to(tl.int64) * (TOP_K * 2 * INNER)
        gate = tl.load(gate_at)
        up = tl.load(gate_at + 8)
        for part in tl.static_range(1, SPLITS):
            gate += tl.load(gate_at + part * stride)
            up += tl.load(gate_at + part * stride + 8)
        tl.store(act_ptr + slot.to(tl.int64) * INNER + i, _weighted_silu(gate, up, weight))
    elif CLEAR:
        out = down_ptr + (rank * num_rows + row).to(tl.int64) * D
        for first in range(tl.program_id(1) * BLOCK, D, tl.num_programs(1) * BLOCK):
            d = first + tl.arange(0, BLOCK)
            tl.store(out + d, tl.zeros((BLOCK,), down_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def dense_product(
    weight_ptr, x_ptr, x_offsets,
    K: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [BN, ROWS] = W[BN, K] . x^T for a bfloat16 matrix, K a multiple of 64."""
    acc = tl.zeros((BN, ROWS), tl.float32)
    k = tl.arange(0, 64)
    weight = weight_ptr + tl.arange(0, BN)[:, None] * K + k[None, :]
    x_tile = x_ptr + x_offsets[None, :] + k[:, None]
    for first in tl.range(0, K, 64, num_stages=STAGES):
        acc = multiply(tl.load(weight + first), tl.load(x_tile + first), acc, ASM)
    return acc


@triton.jit
def _store_slots(acc, out_ptr, slots, keep, first_n, num_rows, TOP_K: tl.constexpr, D: tl.constexpr, BN: tl.constexpr):
    n = first_n + tl.arange(0, BN)
    row = (slots % TOP_K) * num_rows + slots // TOP_K
    out = out_ptr + row[None, :].to(tl.int64) * D + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=keep[None, :])


@triton.jit(do_not_specialize=["num_rows", "last_block"])
def down_kernel(
    act_ptr, words_ptr, scales_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, num_blocks_ptr, shared_act_ptr,
    shared_ptr, out_ptr, num_rows, last_block,
    TOP_K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, SHARED_ROWS: tl.constexpr,
    BN: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Each slot's down product [K, T, D], and at [K] the shared expert's where SHARED_INNER > 0.

    Every program has an equal stretch of all (block, tile) units, in which a tile of the shared expert counts as the
    units that have as many bytes.
    """
    wait(PDL)
    TILES: tl.constexpr = D // BN
    WEIGHT: tl.constexpr = (SHARED_INNER * 32 + INNER * 9 - 1) // (INNER * 9)
    num_blocks = tl.load(num_blocks_ptr)
    total = num_blocks * TILES + WEIGHT * TILES
    first = (tl.program_id(0).to(tl.int64) * total // tl.num_programs(0)).to(tl.int32)
    end = ((tl.program_id(0) + 1).to(tl.int64) * total // tl.num_programs(0)).to(tl.int32)
    if SHARED_INNER > 0:
        r = tl.arange(0, SHARED_ROWS)
        for tile in range(tl.cdiv(first, WEIGHT), tl.minimum(tl.cdiv(end, WEIGHT), TILES)):
            acc = dense_product(
                shared_ptr + tile * (BN * SHARED_INNER), shared_act_ptr, tl.where(r < num_rows, r, 0) * SHARED_INNER,
                SHARED_INNER, BN, SHARED_ROWS, 3, ASM,
            )  # fmt: skip
            shared_out = out_ptr + num_rows.to(tl.int64) * (TOP_K * D)
            _store_slots(acc, shared_out, r * TOP_K, r < num_rows, tile * BN, num_rows, TOP_K, D, BN)
    unit = tl.maximum(first - WEIGHT * TILES, 0)
    end -= WEIGHT * TILES
    while unit < end:
        tile = unit % TILES
        stop = tl.minimum(TILES, tile + end - unit)
        expert, slots, keep = _block(block_experts_ptr, block_sizes_ptr, rows_ptr, unit // TILES, last_block, ROWS)
        _down_tiles(
            act_ptr, words_ptr + expert * (D * INNER // 4), scales_ptr + expert * (D * INNER // 32), out_ptr,
            slots, keep, tile, stop, num_rows, TOP_K, D, INNER, BN, ROWS, GROUPED, STAGES, ASM,
        )  # fmt: skip
        unit += stop - tile


@triton.jit
def _down_tiles(
    act_ptr, words_ptr, scales_ptr, out_ptr, slots, keep, first_tile, stop_tile, num_rows,
    TOP_K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    GROUPED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles of one block: with a short K one pipelined loop over tiles, otherwise one over K for each tile."""
    K_BLOCKS: tl.constexpr = INNER // 128
    if GROUPED and K_BLOCKS <= 2:
        word_offsets = tile_offsets(BN, K_BLOCKS, 32)
        scale_offsets = tile_offsets(BN, K_BLOCKS, 4)
        x_tile = act_ptr + (slots.to(tl.int64) * INNER)[None, :] + tl.arange(0, 32)[:, None]
        for tile in tl.range(first_tile, stop_tile, num_stages=STAGES):
            acc = tl.zeros((BN, ROWS), tl.float32)
            for k in tl.static_range(K_BLOCKS):
                words = tl.load(words_ptr + tile * (BN * INNER // 4) + k * 2048 + word_offsets)
                scales = tl.load(scales_ptr + tile * (BN * INNER // 32) + k * 256 + scale_offsets)
                acc = grouped_step(words, scales, x_tile + k * 128, acc, BN, ROWS, ASM)
            _store_slots(acc, out_ptr, slots, keep, tile * BN, num_rows, TOP_K, D, BN)
    else:
        for tile in range(first_tile, stop_tile):
            acc = int4_product(
                words_ptr + tile * (BN * INNER // 4), scales_ptr + tile * (BN * INNER // 32), act_ptr,
                slots.to(tl.int64) * INNER, 0, K_BLOCKS, K_BLOCKS, BN, ROWS, STAGES, GROUPED, ASM,
            )  # fmt: skip
            _store_slots(acc, out_ptr, slots, keep, tile * BN, num_rows, TOP_K, D, BN)


@triton.jit(do_not_specialize=["num_rows"])
def sum_kernel(
    ids_ptr, slot_ptr, shared_ptr, out_ptr, num_rows,
    TOP_K: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of the row's slots [K, T, D] in order of expert id, then the shared expert's, in float32."""
    wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = count_here(ids_ptr, row, TOP_K)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        at = (k * num_rows + row).to(tl.int64) * D
        total += tl.load(slot_ptr + at + d, mask=(d < D) & (k < count), other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * D + d, total, mask=d < D)
