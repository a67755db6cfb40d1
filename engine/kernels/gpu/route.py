"""The router's choice and the shared expert's activation, from one product's parts.

Shape letters: T rows, P parts of a split sum, E experts, K experts a token, I shared expert columns of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.gpu import pdl
from engine.kernels.gpu.experts_plan import BLOCK_ROWS, empty_plan, plan_one_row
from engine.kernels.gpu.norm import silu
from engine.kernels.table import Routing

_LOWEST = tl.constexpr(-(1 << 63))  # below the key of any score
WARPS = 1  # eight maxima in a row: a warp's shuffles beat a block's barriers


@triton.jit
def sigmoid_key(score, e):
    """Orders by score, then by lowest expert: float32 bits made monotone, in the high half of an int64."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    parts_ptr,
    bias_ptr,
    num_tokens_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    block_experts_ptr,
    block_sizes_ptr,
    rows_ptr,
    slot_weights_ptr,
    num_blocks_ptr,
    counts_ptr,
    num_rows,
    first_expert,
    num_local,
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_I: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PLAN_ROWS: tl.constexpr,
    COUNTS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, 0) routes row t; (t, 1) makes silu(gate) * up of its shared expert."""
    row = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = E + 2 * INNER
    stride = num_rows.to(tl.int64) * width
    parts_ptr += row * width
    if tl.program_id(1) == 0:
        e, k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0)
        pdl.wait(PDL)
        logits = tl.zeros((BLOCK_E,), tl.float32)
        for part in tl.static_range(PARTS):
            logits += tl.load(parts_ptr + part * stride + e, mask=e < E, other=0.0)
        scores = tl.sigmoid(logits)
        keys = tl.where(e < E, sigmoid_key(scores + bias, e), _LOWEST)
        ids = tl.zeros((BLOCK_K,), tl.int32)
        for choice in tl.static_range(K):
            best = tl.max(keys, 0)
            ids = tl.where(k == choice, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), ids)
            keys = tl.where(keys == best, _LOWEST, keys)
        chosen = (ids[:, None] == e[None, :]) & (k < K)[:, None]
        weights = tl.sum(tl.where(chosen, scores[None, :], 0.0), 1)
        if NORMALIZE:
            weights = weights / (tl.sum(weights, 0) + 1e-20)
        is_token = row < tl.load(num_tokens_ptr)
        if COUNTS:  # no order among them: integers add up to the same
            tl.atomic_add(counts_ptr + ids, tl.full((BLOCK_K,), 1, tl.int64), mask=(k < K) & is_token, sem="relaxed")
        here = (ids >= first_expert) & (ids < first_expert + num_local) & is_token
        ids = tl.where(here & (k < K), ids - first_expert, -1)
        tl.store(ids_ptr + row * K + k, ids, mask=k < K)
        tl.store(weights_ptr + row * K + k, weights * scale, mask=k < K)
        if PLAN_ROWS > 0:
            plan_one_row(
                ids,
                weights * scale,
                block_experts_ptr,
                block_sizes_ptr,
                rows_ptr,
                slot_weights_ptr,
                num_blocks_ptr,
                PLAN_ROWS,
            )
    else:
        i = tl.arange(0, BLOCK_I)
        pdl.wait(PDL)
        if INNER > 0:
            gate = tl.zeros((BLOCK_I,), tl.float32)
            up = tl.zeros((BLOCK_I,), tl.float32)
            for part in tl.static_range(PARTS):
                gate += tl.load(parts_ptr + part * stride + E + i, mask=i < INNER, other=0.0)
                up += tl.load(parts_ptr + part * stride + E + INNER + i, mask=i < INNER, other=0.0)
            dtype: tl.constexpr = shared_ptr.dtype.element_ty
            hidden = silu(gate, dtype) * up.to(dtype).to(tl.float32)
            tl.store(shared_ptr + row * INNER + i, hidden.to(dtype), mask=i < INNER)


def route(
    parts_PTW: torch.Tensor,
    bias_E: torch.Tensor,
    num_tokens_1: torch.Tensor,
    local_experts: range,
    top_k: int,
    normalize: bool,
    scale: float,
    dtype: torch.dtype,
    counts_E: torch.Tensor | None = None,
) -> Routing:
    """Local expert ids int32 [T, K] (-1 = not here, or a padding row), weights float32 [T, K], the shared expert's
    activation [T, I], and for a single row the plan of its products.

    parts_PTW: float32 parts of x's product with [router | gate | up], W = E + 2I. Rows from num_tokens_1 on are
    padding. The experts are those of `engine.kernels.reference.route`, in falling order of score. counts_E: int64, to
    which each choice is added as by `engine.kernels.reference.count_experts`.
    """
    num_parts, num_rows, width = parts_PTW.shape
    num_experts = bias_E.shape[0]
    inner = (width - num_experts) // 2
    device = parts_PTW.device
    ids_TK = torch.empty(num_rows, top_k, dtype=torch.int32, device=device)
    weights_TK = torch.empty(num_rows, top_k, dtype=torch.float32, device=device)
    shared_TI = torch.empty(num_rows, inner, dtype=dtype, device=device)
    plan = empty_plan(top_k, top_k, BLOCK_ROWS, device) if num_rows == 1 else None
    route_kernel[(num_rows, 2 if inner else 1)](
        parts_PTW,
        bias_E,
        num_tokens_1,
        ids_TK,
        weights_TK,
        shared_TI,
        *(plan or [ids_TK, ids_TK, ids_TK, weights_TK, ids_TK]),  # stand-ins that nothing writes
        ids_TK if counts_E is None else counts_E,
        num_rows,
        local_experts.start,
        len(local_experts),
        scale,
        E=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        INNER=inner,
        BLOCK_I=max(triton.next_power_of_2(inner), 1),
        NORMALIZE=normalize,
        PLAN_ROWS=BLOCK_ROWS if plan else 0,
        COUNTS=counts_E is not None,
        PARTS=num_parts,
        num_warps=WARPS,
        **pdl.launch_options(device),
    )
    return Routing(ids_TK, weights_TK, shared_TI, plan)


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options) of K2.5's router, with and without a shared expert's slice."""
    names = ("parts_ptr", "bias_ptr", "weights_ptr")
    signature = dict.fromkeys(names, "*fp32") | {"num_tokens_ptr": "*i32", "ids_ptr": "*i32", "shared_ptr": "*bf16"}
    signature |= {"num_rows": "i32", "first_expert": "i32", "num_local": "i32", "scale": "fp32"}
    signature |= dict.fromkeys(("block_experts_ptr", "block_sizes_ptr", "rows_ptr", "num_blocks_ptr"), "*i32")
    signature |= {"slot_weights_ptr": "*fp32", "counts_ptr": "*i64"}
    chosen = {"E": 384, "BLOCK_E": 512, "K": 8, "BLOCK_K": 8, "NORMALIZE": True, "PDL": capability >= (9, 0)}
    return [
        (f"route {inner} {parts} {rows} {counts}", route_kernel, signature,
         chosen | {"INNER": inner, "BLOCK_I": max(inner, 1), "PARTS": parts, "PLAN_ROWS": rows, "COUNTS": counts},
         {"num_warps": WARPS})
        for inner, parts, rows, counts in ((256, 8, BLOCK_ROWS, True), (256, 8, 0, True), (0, 1, 0, False))
    ]  # fmt: skip
