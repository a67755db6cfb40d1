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
LARGEST_KERNEL_PLAN = 16384  # pairs; each program looks at all of them
PAIRS_A_PROGRAM = 16
PAIRS_A_LOOK = 512


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

    One kernel while pairs are few; beyond, tensor operations without a look at the data from the host.
    """
    if ids_TK.numel() > LARGEST_KERNEL_PLAN:
        return _plan_many(ids_TK, weights_TK, num_experts, block_rows)
    top_k, num_pairs = ids_TK.shape[1], ids_TK.numel()
    plan = empty_plan(num_pairs, max_blocks(num_pairs, num_experts, block_rows), block_rows, ids_TK.device)
    plan_kernel[(triton.cdiv(num_pairs, PAIRS_A_PROGRAM),)](
        ids_TK, weights_TK, *plan, num_pairs,
        TOP_K=top_k, ROWS=block_rows, PAIRS=min(PAIRS_A_LOOK, max(16, triton.next_power_of_2(num_pairs))),
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


@triton.jit(do_not_specialize=["num_pairs"])
def plan_kernel(
    ids_ptr, weights_ptr, block_experts_ptr, block_sizes_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, num_pairs,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, PART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program i places PART pairs; each counts all pairs for itself, so that none waits for another."""
    wait(PDL)
    p = tl.program_id(0) * PART + tl.arange(0, PART)
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=-1)
    here = ids >= 0
    e = tl.arange(0, EXPERTS)
    count = tl.zeros((PART,), tl.int32)
    earlier = tl.zeros((PART,), tl.int32)  # in rows before this one
    sizes = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, num_pairs, PAIRS):
        q = first + tl.arange(0, PAIRS)
        others = tl.load(ids_ptr + q, mask=q < num_pairs, other=-1)
        same = (ids[:, None] == others[None, :]) & here[:, None]
        count += tl.sum(same.to(tl.int32), 1)
        earlier += tl.sum((same & (q[None, :] < p[:, None])).to(tl.int32), 1)
        sizes += tl.histogram(tl.where(others >= 0, others, EXPERTS - 1), EXPERTS)  # the last is no expert's
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


def _plan_many(ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, block_rows: int) -> Plan:
    top_k = ids_TK.shape[1]
    device, num_pairs = ids_TK.device, ids_TK.numel()
    blocks = max_blocks(num_pairs, num_experts, block_rows)
    here_TK = ids_TK >= 0
    lower_TKK = (ids_TK.unsqueeze(1) < ids_TK.unsqueeze(2)) & here_TK.unsqueeze(1)
    first_T1 = torch.arange(0, num_pairs, top_k, device=device).unsqueeze(1)
    # Pairs that are not here go behind the row's others, so that slots are a permutation.
    rank_TK = torch.where(here_TK, lower_TKK.sum(-1), here_TK.sum(-1, keepdim=True) + (~here_TK).cumsum(-1) - 1)
    slot_P = (first_T1 + rank_TK).flatten()
    expert_P = torch.where(here_TK, ids_TK, num_experts).flatten().long()
    sorted_P, order_P = expert_P.sort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert_P, torch.ones_like(expert_P))
    within_P = torch.arange(num_pairs, device=device) - (counts.cumsum(0) - counts)[sorted_P]
    blocks_E = (counts[:-1] + block_rows - 1) // block_rows
    ends_E = blocks_E.cumsum(0)
    firsts = torch.cat((ends_E - blocks_E, ends_E[-1:]))
    place_P = (firsts[sorted_P] + within_P // block_rows) * block_rows + within_P % block_rows
    place_P = torch.where(sorted_P < num_experts, place_P, blocks * block_rows)
    rows = torch.full((blocks * block_rows + 1,), -1, dtype=torch.int32, device=device)
    rows.scatter_(0, place_P, slot_P[order_P].int())
    block_B = torch.arange(blocks, device=device)
    block_experts = torch.searchsorted(ends_E, block_B, right=True)
    in_expert_B = (block_B - firsts[block_experts]) * block_rows
    block_sizes = (counts[block_experts] - in_expert_B).clamp(0, block_rows)
    slot_weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    slot_weights.scatter_(0, slot_P, weights_TK.flatten().float())
    rows = rows[:-1].view(blocks, block_rows)
    return Plan(block_experts.int(), block_sizes.int(), rows, slot_weights, ends_E[-1:].int())


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the plan for 1 and for 64 rows."""
    signature = {"weights_ptr": "*fp32", "slot_weights_ptr": "*fp32", "num_pairs": "i32"}
    cases = []
    for pairs in (16, 512):
        constants = {"TOP_K": 8, "ROWS": 8, "PAIRS": pairs, "EXPERTS": 512, "PART": PAIRS_A_PROGRAM}
        constants["PDL"] = capability >= (9, 0)
        names = [name for name in plan_kernel.arg_names if name not in constants]
        arguments = {name: signature.get(name, "*i32") for name in names}
        cases.append((f"plan {pairs}", plan_kernel, arguments, constants, {"num_warps": 4}))
    return cases
