"""Which blocks of rows the expert products run over: every expert's rows in blocks of at most R, experts ascending.

A pair is one expert of one row. Pairs are known by their slot: row * K + the rank of the expert among the row's own, so
that a row's slots are in order of expert id. `rows[b, i]` is the slot at position i of block b or -1.

Shape letters: T rows of x, K experts a row, E experts here, P = T * K pairs, B blocks, R rows a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.pdl import launch_options, wait

LARGEST_ONE_PROGRAM_PLAN = 64


class Plan(NamedTuple):
    """block_experts int32 [B], rows int32 [B, R], slot_weights float32 [P], num_blocks int32 [1], counters int32 [C].

    Only the first num_blocks entries mean anything. Counters are zero and for the products' use.
    """

    block_experts: torch.Tensor
    rows: torch.Tensor
    slot_weights: torch.Tensor
    num_blocks: torch.Tensor
    counters: torch.Tensor


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that any routing can give."""
    return min(num_pairs, min(num_pairs, num_experts) + num_pairs // block_rows)


def plan_blocks(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, block_rows: int, counters_a_block: int
) -> Plan:
    """Plan for ids int32 [T, K] (-1 = not here), distinct in each row, and weights float32 [T, K].

    One program up to 64 rows; beyond, tensor operations without a look at the data from the host. With at most
    `block_rows` rows, a row has the same position, its own number, in all blocks.
    """
    if ids_TK.shape[0] > LARGEST_ONE_PROGRAM_PLAN:
        return _plan_many(ids_TK, weights_TK, num_experts, block_rows, counters_a_block)
    num_rows, top_k = ids_TK.shape
    blocks = max_blocks(ids_TK.numel(), num_experts, block_rows)
    new = {"dtype": torch.int32, "device": ids_TK.device}
    plan = Plan(
        torch.empty(blocks, **new),
        torch.empty(blocks, block_rows, **new),
        torch.empty(ids_TK.numel(), dtype=torch.float32, device=ids_TK.device),
        torch.empty(1, **new),
        torch.empty(blocks * counters_a_block, **new),
    )
    pairs = max(16, triton.next_power_of_2(ids_TK.numel()))
    _plan_kernel[(1,)](
        ids_TK, weights_TK, *plan, num_rows, blocks * block_rows, plan.counters.numel(),
        TOP_K=top_k, ROWS=block_rows, PAIRS=pairs, CHUNK=min(pairs, 32),
        num_warps=4 if pairs <= 32 else 8, **launch_options(ids_TK.device),
    )  # fmt: skip
    return plan


@triton.jit
def plan_program(
    ids_ptr, weights_ptr, block_experts_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, counters_ptr,
    num_rows, num_positions, num_counters,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The whole plan by one program, so that a router kernel's last program can do it."""
    for first in range(0, num_positions, 1024):
        position = first + tl.arange(0, 1024)
        tl.store(rows_ptr + position, -1, mask=position < num_positions)
    for first in range(0, num_counters, 1024):
        counter = first + tl.arange(0, 1024)
        tl.store(counters_ptr + counter, 0, mask=counter < num_counters)
    tl.debug_barrier()
    p = tl.arange(0, PAIRS)
    num_pairs = num_rows * TOP_K
    ids = tl.load(ids_ptr + p, mask=p < num_pairs, other=-1)
    here = ids >= 0
    row = p // TOP_K
    earlier = tl.zeros((PAIRS,), tl.int32)  # pairs of the same expert in rows before this one
    block = tl.zeros((PAIRS,), tl.int32)  # blocks of experts with a lower id
    total = 0
    for first in range(0, PAIRS, CHUNK):
        q = first + tl.arange(0, CHUNK)
        others = tl.load(ids_ptr + q, mask=q < num_pairs, other=-1)
        same = (ids[:, None] == others[None, :]) & here[:, None]
        earlier += tl.sum((same & (q[None, :] < p[:, None])).to(tl.int32), 1)
        before_q = tl.sum((same & (p[:, None] < q[None, :])).to(tl.int32), 0)
        leads = (others >= 0) & (before_q % ROWS == 0)
        block += tl.sum((leads[None, :] & (others[None, :] < ids[:, None])).to(tl.int32), 1)
        total += tl.sum(leads.to(tl.int32), 0)
    slot = row * TOP_K
    for k in tl.static_range(TOP_K):
        other = tl.load(ids_ptr + row * TOP_K + k, mask=p < num_pairs, other=-1)
        slot += ((other >= 0) & (other < ids)).to(tl.int32)
    position = earlier % ROWS
    if num_rows <= ROWS:
        position = row
    block += earlier // ROWS
    tl.store(block_experts_ptr + block, ids, mask=here & (earlier % ROWS == 0))
    tl.store(rows_ptr + block * ROWS + position, slot, mask=here)
    weight = tl.load(weights_ptr + p, mask=here, other=0.0)
    tl.store(slot_weights_ptr + slot, weight, mask=here)
    tl.store(num_blocks_ptr, total)


@triton.jit(do_not_specialize=["num_rows", "num_positions", "num_counters"])
def _plan_kernel(
    ids_ptr, weights_ptr, block_experts_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, counters_ptr,
    num_rows, num_positions, num_counters,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    plan_program(
        ids_ptr, weights_ptr, block_experts_ptr, rows_ptr, slot_weights_ptr, num_blocks_ptr, counters_ptr,
        num_rows, num_positions, num_counters, TOP_K, ROWS, PAIRS, CHUNK,
    )  # fmt: skip


def _plan_many(
    ids_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int, block_rows: int, counters_a_block: int
) -> Plan:
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
    block_experts = torch.searchsorted(ends_E, torch.arange(blocks, device=device), right=True).int()
    slot_weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
    slot_weights.scatter_(0, slot_P, weights_TK.flatten().float())
    counters = torch.zeros(blocks * counters_a_block, dtype=torch.int32, device=device)
    return Plan(block_experts, rows[:-1].view(blocks, block_rows), slot_weights, ends_E[-1:].int(), counters)


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of the plan for 1 and for 64 rows."""
    numbers = ("num_rows", "num_positions", "num_counters")
    signature = {"weights_ptr": "*fp32", "slot_weights_ptr": "*fp32"}
    cases = []
    for pairs, warps in ((16, 4), (512, 8)):
        constants = {"TOP_K": 8, "ROWS": 16, "PAIRS": pairs, "CHUNK": min(pairs, 32), "PDL": capability >= (9, 0)}
        arguments = {
            name: signature.get(name, "i32" if name in numbers else "*i32")
            for name in _plan_kernel.arg_names
            if name not in constants
        }
        cases.append((f"plan {pairs}", _plan_kernel, arguments, constants, {"num_warps": warps}))
    return cases
