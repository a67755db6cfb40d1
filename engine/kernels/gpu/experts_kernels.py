"""Products of the routed experts: gate and up with SiLU, down, and the sum over a row's experts.

Work items are (block of rows, tile of weight rows, part of K); programs are persistent and read the number of blocks
from the device, so time does not depend on how many blocks there could be. A row's result has one order of additions
whatever the other rows are.

Letters: D model width, INNER expert width here, BN weight rows a program, ROWS positions a block,
SPLITS parts of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.int4 import dequantised_tile, int4_product, multiply, tile_offsets
from engine.kernels.gpu.pdl import prefetch_rows, wait


@triton.jit(do_not_specialize=["num_slots"])
def gate_up_kernel(
    x_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, counters_ptr,
    partial_ptr, act_ptr, num_slots,
    TOP_K: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """act[slot, i] = bf16(weight * silu(gate) * up), float32 up to its one rounding.

    Rows of gate and up alternate in eights (see `interleave`). With SPLITS > 1 the parts go to
    partial float32 [SPLITS, slots, 2I]; the program that comes last adds them in order of K.
    """
    wait(PDL)
    K_BLOCKS: tl.constexpr = D // 128
    TILES: tl.constexpr = 2 * INNER // BN
    num_items = tl.load(num_blocks_ptr) * (TILES * SPLITS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part = item % SPLITS
        tile = (item // SPLITS) % TILES
        block = item // (SPLITS * TILES)
        expert = tl.load(block_experts_ptr + block).to(tl.int64)
        slots = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS))
        keep = slots >= 0
        slots = tl.where(keep, slots, 0)
        first_row = expert * (2 * INNER) + tile * BN
        acc = int4_product(
            words_ptr + first_row * (D // 4), scales_ptr + first_row * (D // 32), x_ptr, slots // TOP_K * D, keep,
            part * (K_BLOCKS // SPLITS), K_BLOCKS, K_BLOCKS // SPLITS, BN, ROWS, STAGES, ASM,
        )  # fmt: skip
        last = True
        if SPLITS > 1:
            n = tile * BN + tl.arange(0, BN)
            partial = partial_ptr + slots[None, :].to(tl.int64) * (2 * INNER) + n[:, None]
            stride = num_slots.to(tl.int64) * (2 * INNER)
            tl.store(partial + part * stride, acc, mask=keep[None, :])
            tl.debug_barrier()
            last = tl.atomic_add(counters_ptr + block * TILES + tile, 1, sem="acq_rel") == SPLITS - 1
            if last:
                acc = tl.load(partial, mask=keep[None, :], other=0.0, cache_modifier=".cg")
                for other in tl.static_range(1, SPLITS):
                    acc += tl.load(partial + other * stride, mask=keep[None, :], other=0.0, cache_modifier=".cg")
        if last:
            weights = tl.load(slot_weights_ptr + slots, mask=keep, other=0.0)
            _store_act(acc, weights, slots, keep, act_ptr, tile, INNER, BN, ROWS)


@triton.jit
def _store_act(acc, weights, slots, keep, act_ptr, tile, INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    HALF: tl.constexpr = BN // 2
    pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, ROWS)), (0, 2, 3, 1))
    gate, up = tl.split(pairs)
    gate = tl.reshape(gate, (HALF, ROWS))
    up = tl.reshape(up, (HALF, ROWS))
    act = gate / (1.0 + tl.exp(-gate)) * up * weights[None, :]
    offsets = slots[None, :].to(tl.int64) * INNER + (tile * HALF + tl.arange(0, HALF))[:, None]
    tl.store(act_ptr + offsets, act.to(tl.bfloat16), mask=keep[None, :])


@triton.jit
def dense_product(
    weight_ptr, x_ptr, x_offsets, keep,
    K: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [BN, ROWS] = W[BN, K] . x^T for a bfloat16 matrix, K a multiple of 64."""
    acc = tl.zeros((BN, ROWS), tl.float32)
    k = tl.arange(0, 64)
    weight = weight_ptr + tl.arange(0, BN)[:, None] * K + k[None, :]
    x_tile = x_ptr + x_offsets[None, :] + k[:, None]
    for first in tl.range(0, K, 64, num_stages=STAGES):
        x = tl.load(x_tile + first, mask=keep[None, :], other=0.0)
        acc = multiply(tl.load(weight + first), x, acc, ASM)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def down_kernel(
    act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, num_blocks_ptr, shared_act_ptr, shared_ptr, slot_ptr,
    shared_out_ptr, num_rows,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each slot's down product [slots, D], and the shared expert's [T, D] where SHARED_INNER > 0."""
    wait(PDL)
    K_BLOCKS: tl.constexpr = INNER // 128
    TILES: tl.constexpr = D // BN
    num_shared = 0
    if SHARED_INNER > 0:
        num_shared = tl.cdiv(num_rows, ROWS) * TILES
    num_items = tl.load(num_blocks_ptr) * TILES + num_shared
    r = tl.arange(0, ROWS)
    n = tl.arange(0, BN)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile = item % TILES
        if item < num_shared:
            rows = item // TILES * ROWS + r
            keep = rows < num_rows
            acc = dense_product(
                shared_ptr + tile * (BN * SHARED_INNER),
                shared_act_ptr,
                rows * SHARED_INNER,
                keep,
                SHARED_INNER,
                BN,
                ROWS,
                3,
                ASM,
            )
            out = shared_out_ptr + rows[None, :].to(tl.int64) * D + (tile * BN + n)[:, None]
            tl.store(out, acc, mask=keep[None, :])
        else:
            block = (item - num_shared) // TILES
            expert = tl.load(block_experts_ptr + block).to(tl.int64)
            slots = tl.load(rows_ptr + block * ROWS + r)
            keep = slots >= 0
            slots = tl.where(keep, slots, 0)
            first_row = expert * D + tile * BN
            acc = int4_product(
                words_ptr + first_row * (INNER // 4), scales_ptr + first_row * (INNER // 32), act_ptr, slots * INNER,
                keep, 0, K_BLOCKS, K_BLOCKS, BN, ROWS, STAGES, ASM,
            )  # fmt: skip
            out = slot_ptr + slots[None, :].to(tl.int64) * D + (tile * BN + n)[:, None]
            tl.store(out, acc.to(slot_ptr.dtype.element_ty), mask=keep[None, :])


@triton.jit
def sum_kernel(
    ids_ptr, slot_ptr, shared_ptr, out_ptr,
    TOP_K: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = sum of the row's slots in order of expert id, then the shared expert's, in float32."""
    wait(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = 0
    for k in tl.static_range(TOP_K):
        count += (tl.load(ids_ptr + row * TOP_K + k) >= 0).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    slots = slot_ptr + row.to(tl.int64) * (TOP_K * D) + d
    for k in tl.static_range(TOP_K):
        total += tl.load(slots + k * D, mask=(d < D) & (k < count), other=0.0).to(tl.float32)
    if SHARED:
        total += tl.load(shared_ptr + row.to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=["num_rows"])
def down_sum_kernel(
    act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, num_blocks_ptr, shared_act_ptr, shared_ptr, out_ptr,
    num_rows,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] as `down_kernel` and `sum_kernel` give it, bit for bit, for at most ROWS rows: one program a tile of D.

    Walks through all experts in one pipelined loop; position i of a block must be row i.
    """
    K_BLOCKS: tl.constexpr = INNER // 128
    first_n = tl.program_id(0) * BN
    if SHARED_INNER > 0:
        prefetch_rows(shared_ptr + (first_n + tl.arange(0, BN)) * SHARED_INNER, SHARED_INNER * 2, PDL)
    wait(PDL)
    r = tl.arange(0, ROWS)
    total = tl.zeros((BN, ROWS), tl.float32)
    acc = tl.zeros((BN, ROWS), tl.float32)
    num_steps = tl.load(num_blocks_ptr) * K_BLOCKS
    if SHARED_INNER > 0:
        shared = dense_product(
            shared_ptr + first_n * SHARED_INNER,
            shared_act_ptr,
            r * SHARED_INNER,
            r < num_rows,
            SHARED_INNER,
            BN,
            ROWS,
            5,
            ASM,
        )
    total = _sum_experts(
        act_ptr, words_ptr + first_n * (INNER // 4), scales_ptr + first_n * (INNER // 32), block_experts_ptr, rows_ptr,
        num_steps, total, acc, D, INNER, K_BLOCKS, BN, ROWS, STAGES, ASM,
    )  # fmt: skip
    if SHARED_INNER > 0:
        total += shared
    n = first_n + tl.arange(0, BN)
    tl.store(out_ptr + r[None, :] * D + n[:, None], total, mask=(r < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def down_stream_kernel(
    act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, num_blocks_ptr, shared_act_ptr, shared_ptr, slot_ptr,
    shared_out_ptr, num_rows,
    D: tl.constexpr, INNER: tl.constexpr, SHARED_INNER: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`down_kernel` for a short K: program (tile, g) takes every num_programs(1)-th block in one pipelined loop."""
    wait(PDL)
    K_BLOCKS: tl.constexpr = INNER // 128
    first_n = tl.program_id(0) * BN
    n = first_n + tl.arange(0, BN)
    r = tl.arange(0, ROWS)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    num_steps = tl.cdiv(tl.load(num_blocks_ptr) - group, groups) * K_BLOCKS
    if SHARED_INNER > 0:
        for first in range(group * ROWS, num_rows, groups * ROWS):
            rows = first + r
            shared = dense_product(
                shared_ptr + first_n * SHARED_INNER, shared_act_ptr, rows * SHARED_INNER, rows < num_rows, SHARED_INNER,
                BN, ROWS, 3, ASM,
            )  # fmt: skip
            out = shared_out_ptr + rows[None, :].to(tl.int64) * D + n[:, None]
            tl.store(out, shared, mask=(rows < num_rows)[None, :])
    words_ptr += first_n * (INNER // 4)
    scales_ptr += first_n * (INNER // 32)
    acc = tl.zeros((BN, ROWS), tl.float32)
    for step in tl.range(0, num_steps, num_stages=STAGES):
        block = step // K_BLOCKS * groups + group
        acc, slots = _expert_step(
            act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, block, step % K_BLOCKS, acc,
            D, INNER, K_BLOCKS, BN, ROWS, ASM,
        )  # fmt: skip
        done = (slots >= 0) & (step % K_BLOCKS == K_BLOCKS - 1)
        out = slot_ptr + slots[None, :].to(tl.int64) * D + n[:, None]
        tl.store(out, acc.to(slot_ptr.dtype.element_ty), mask=done[None, :])


@triton.jit
def _sum_experts(
    act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, num_steps, total, acc,
    D: tl.constexpr, INNER: tl.constexpr, K_BLOCKS: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    for step in tl.range(0, num_steps, num_stages=STAGES):
        acc, _ = _expert_step(
            act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, step // K_BLOCKS, step % K_BLOCKS, acc,
            D, INNER, K_BLOCKS, BN, ROWS, ASM,
        )  # fmt: skip
        total += tl.where(step % K_BLOCKS == K_BLOCKS - 1, acc, 0.0)
    return total


@triton.jit
def _expert_step(
    act_ptr, words_ptr, scales_ptr, block_experts_ptr, rows_ptr, block, k_block, acc,
    D: tl.constexpr, INNER: tl.constexpr, K_BLOCKS: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """One block's next 128 columns of K; a block starts from zero, so no other block is in its sum."""
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    slots = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS))
    words = tl.load(words_ptr + expert * (D * INNER // 4) + k_block * 2048 + tile_offsets(BN, K_BLOCKS, 32))
    scales = tl.load(scales_ptr + expert * (D * INNER // 32) + k_block * 256 + tile_offsets(BN, K_BLOCKS, 4))
    x_offsets = slots * INNER + k_block * 128
    x = tl.load(act_ptr + x_offsets[None, :] + tl.arange(0, 128)[:, None], mask=(slots >= 0)[None, :], other=0.0)
    tile = dequantised_tile(words, scales, BN, ASM)
    return multiply(tile, x, tl.where(k_block == 0, 0.0, acc), ASM), slots
