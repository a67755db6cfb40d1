"""Which blocks of rows the expert products run over: every expert's rows in blocks of at most R, experts ascending.

A pair is one expert of one row. Pairs are known by their slot: row * K + the rank of the expert among the row's own, so
that a row's slots are in order of expert id. `rows[b, i]` is the slot at position i of block b.

Shape letters: T rows of x, K experts a row, E experts here, P = T * K pairs, B blocks, R rows a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.pdl import launch_options, wait

BLOCK_ROWS = 8  # rows of a block in products of few rows
LARGEST_KERNEL_PLAN = 64
PAIRS_A_PROGRAM = 16
CHUNK = 128  # pairs; a multiple of those of a program


class Plan(NamedTuple):
    """block_experts, block_sizes int32 [B], rows int32 [B, R], slot_weights float32 [P], num_blocks int32 [1].

    Only the first num_blocks entries mean anything, and of each block's rows the first block_sizes.
    """

    block_experts: torch.Tensor
    block_sizes: torch.Tensor
    rows: torch.Tensor
    slot_weights: torch.Tensor
    num_blocks: torch.Tensor


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any routing can give."""
    return min(num_pairs, min(num_pairs, num_experts) + num_pairs // block_rows)


def plan_blocks(ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, block_rows: int) -> Plan:
    """Plan for ids int32 [T, K] (-1 = not here), distinct in each row, and weights float32 [T, K].

    One kernel up to 64 rows, three beyond.
    """
    if ids_TK.shape[0] > LARGEST_KERNEL_PLAN:
        return _plan_many(ids_TK, weights_TK, num_experts, block_rows)
    top_k, num_pairs = ids_TK.shape[1], ids_TK.numel()
    plan = empty_plan(num_pairs, max_blocks(num_pairs, num_experts, block_rows), block_rows, ids_TK.device)
    plan_kernel[(triton.cdiv(num_pairs, PAIRS_A_PROGRAM),)](
        ids_TK, weights_TK, *plan, num_pairs,
        TOP_K=top_k, ROWS=block_rows, PAIRS=max(16, triton.next_power_of_2(num_pairs)),
        EXPERTS=triton.next_power_of_2(num_experts + 1), PART=PAIRS_A_PROGRAM, num_warps=4,
        **launch_options(ids_TK.device),
    )  # fmt: skip
    return plan


def empty_plan(num_pairs: int, num_blocks: int, block_rows: int, device: torch.device) -> Plan:
    new = {"dtype": torch.int32, "device": device}
    return Plan(
        torch.empty(num_blocks, **new),
        torch.empty(num_blocks, **new),
        torch.empty(num_blocks, block_rows, **new),
        torch.empty(num_pairs, dtype=torch.float32, device=device),
        torch.empty(1, **new),
    )


@triton.jit
def plan_one_row(
    ids_K, weights_K, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, ROWS: tl.constexpr
):  # fmt: skip
    """The plan of a step of one row, whose choices (-1 = not here) a program holds: a block for each expert."""
    here = ids_K >= 0
    rank = tl.sum(((ids_K[None, :] < ids_K[:, None]) & here[None, :]).to(tl.int32), 1)
    tl.store(block_experts_ptr + rank, ids_K, mask=here)
    tl.store(block_sizes_ptr + rank, here.to(tl.int32), mask=here)
    tl.store(rows_ptr + rank * ROWS, rank, mask=here)
    tl.store(slot_weights_ptr + rank, weights_K, mask=here)
    tl.store(num_blocks_ptr, tl.sum(here.to(tl.int32), 0))


@triton.jit
def _place(
    ids_ptr, weights_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr,
    num_pairs, p, ids, count, earlier, sizes,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Writes pairs p of experts `ids`, which have `count` pairs in all and `earlier` ones before p, to the plan."""
    here = ids >= 0
    e = tl.arange(0, EXPERTS)
    blocks = tl.where(e < EXPERTS - 1, (sizes + ROWS - 1) // ROWS, 0)
    block = tl.sum(tl.where(e[None, :] < ids[:, None], blocks[None, :], 0), 1) + earlier // ROWS
    slot = p // TOP_K * TOP_K
    for k in tl.static_range(TOP_K):
        other = tl.load(ids_ptr + p // TOP_K * TOP_K + k, mask=p < num_pairs, other=-1)
        slot += ((other >= 0) & (other < ids)).to(tl.int32)
    first = here & (earlier % ROWS == 0)
    tl.store(block_experts_ptr + block, ids, mask=first)
    tl.store(block_sizes_ptr + block, tl.minimum(count - earlier, ROWS), mask=first)
    tl.store(rows_ptr + block * ROWS + earlier % ROWS, slot, mask=here)
    weight = tl.load(weights_ptr + p, mask=here, other=0.0)
    tl.store(slot_weights_ptr + slot, weight, mask=here)
    if tl.program_id(0) == 0:
        tl.store(num_blocks_ptr, tl.sum(blocks, 0))


@triton.jit(do_not_specialize=["num_pairs"])
def plan_kernel(
    ids_ptr, weights_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, num_pairs,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i places PART pairs; each counts all pairs for itself, so that none waits for another."""
    wait(PDL)
    q = tl.arange(0, PAIRS)
    all_ids = tl.load(ids_ptr + q, mask=q < num_pairs, other=-1)
    p = tl.program_id(0) * PART + tl.arange(0, PART)
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=-1)
    here = ids >= 0
    same = (ids[:, None] == all_ids[None, :]) & here[:, None]
    count = tl.sum(same.to(tl.int32), 1)
    earlier = tl.sum((same & (q[None, :] < p[:, None])).to(tl.int32), 1)  # in rows before this one
    sizes = tl.histogram(tl.where(all_ids >= 0, all_ids, EXPERTS - 1), EXPERTS)  # the last is no expert's
    _place(
        ids_ptr, weights_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr,
        num_pairs, p, ids, count, earlier, sizes, TOP_K, ROWS, EXPERTS,
    )  # fmt: skip


def _plan_many(ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, block_rows: int) -> Plan:
    """Counts by chunk of pairs, their sums over chunks, then every pair's place."""
    top_k, num_pairs = ids_TK.shape[1], ids_TK.numel()
    device, new = ids_TK.device, {"dtype": torch.int32, "device": ids_TK.device}
    plan = empty_plan(num_pairs, max_blocks(num_pairs, num_experts, block_rows), block_rows, device)
    chunks, experts = triton.cdiv(num_pairs, CHUNK), max(16, triton.next_power_of_2(num_experts + 1))
    counts_CE, sizes_E = torch.empty(chunks, experts, **new), torch.empty(experts, **new)
    options = launch_options(device)
    count_kernel[(chunks,)](ids_TK, counts_CE, num_pairs, EXPERTS=experts, CHUNK=CHUNK, num_warps=4, **options)
    prefix_kernel[(experts // 16,)](counts_CE, sizes_E, chunks, EXPERTS=experts, CHUNKS=64, num_warps=4, **options)
    place_kernel[(triton.cdiv(num_pairs, PAIRS_A_PROGRAM),)](
        ids_TK, weights_TK, counts_CE, sizes_E, *plan, num_pairs, TOP_K=top_k, ROWS=block_rows, EXPERTS=experts,
        CHUNK=CHUNK, PART=PAIRS_A_PROGRAM, num_warps=4, **options,
    )  # fmt: skip
    return plan


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(ids_ptr, counts_ptr, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Program c counts the experts of chunk c; the last expert's count is that of pairs which are not here."""
    wait(PDL)
    p = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=-1)
    counts = tl.histogram(tl.where(ids >= 0, ids, EXPERTS - 1), EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts)


@triton.jit(do_not_specialize=["num_chunks"])
def prefix_kernel(counts_ptr, sizes_ptr, num_chunks, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    """Turns the counts of 16 experts into those of the chunks before, and gives their sums."""
    wait(PDL)
    e = tl.program_id(0) * 16 + tl.arange(0, 16)
    before = tl.zeros((16,), tl.int32)
    for first in range(0, num_chunks, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        at = counts_ptr + c[:, None] * EXPERTS + e[None, :]
        counts = tl.load(at, mask=(c < num_chunks)[:, None], other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, 0) - counts, mask=(c < num_chunks)[:, None])
        before += tl.sum(counts, 0)
    tl.store(sizes_ptr + e, before)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(
    ids_ptr, weights_ptr, counts_ptr, sizes_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr,
    num_blocks_ptr, num_pairs,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i places PART pairs behind those of the chunks before and of its own chunk."""
    wait(PDL)
    p = tl.program_id(0) * PART + tl.arange(0, PART)
    chunk = tl.program_id(0) * PART // CHUNK
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=-1)
    here = ids >= 0
    q = chunk * CHUNK + tl.arange(0, CHUNK)
    others = tl.load(ids_ptr + q, mask=q < num_pairs, other=-1)
    same = (ids[:, None] == others[None, :]) & here[:, None] & (q[None, :] < p[:, None])
    earlier = tl.load(counts_ptr + chunk * EXPERTS + ids, mask=here, other=0) + tl.sum(same.to(tl.int32), 1)
    count = tl.load(sizes_ptr + ids, mask=here, other=0)
    sizes = tl.load(sizes_ptr + tl.arange(0, EXPERTS))
    _place(
        ids_ptr, weights_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr,
        num_pairs, p, ids, count, earlier, sizes, TOP_K, ROWS, EXPERTS,
    )  # fmt: skip


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the plan for 1 and for 64 rows."""
    signature = {"weights_ptr": "*fp32", "slot_weights_ptr": "*fp32", "num_pairs": "i32", "num_chunks": "i32"}
    place = {"TOP_K": 8, "PART": PAIRS_A_PROGRAM, "EXPERTS": 512}
    wanted = [(f"plan {n}", plan_kernel, place | {"ROWS": 8, "PAIRS": n}) for n in (16, 512)]
    wanted.append(("count", count_kernel, {"EXPERTS": 512, "CHUNK": CHUNK}))
    wanted.append(("prefix", prefix_kernel, {"EXPERTS": 512, "CHUNKS": 64}))
    wanted += [(f"place {n}", place_kernel, place | {"ROWS": n, "CHUNK": CHUNK}) for n in (BLOCK_ROWS, 16, 32, 64)]
    cases = []
    for name, kernel, constants in wanted:
        constants["PDL"] = capability >= (9, 0)
        names = [argument for argument in kernel.arg_names if argument not in constants]
        arguments = {argument: signature.get(argument, "*i32") for argument in names}
        cases.append((name, kernel, arguments, constants, {"num_warps": 4}))
    return cases
