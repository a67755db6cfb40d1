"""A verify step's bookkeeping on the device, one launch each: its rows, the guesses it accepts, the place after.

The twins are engine/verify.py, with the same arguments and results. Nothing is read on the host, so that all of it may
be captured in a CUDA graph.

Shape letters: N requests, W rows a request, M = N x W rows in request order, K columns for guesses, S rows of the
state, B blocks a request may hold.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from engine.kernels.gpu.pdl import launch_options, wait
from engine.kernels.verify_rows import NO_GUESS, Accepted, VerifyRows

_PLACES = 64  # a program of the kernel that moves on by one
# One binary whatever the table's width and the room of the state.
SPECIALIZATION = {
    "do_not_specialize": [
        *("start_stride", "limit_stride", "guess_stride", "token_stride", "state_guess_stride"),
        *("table_stride", "num_blocks"),
    ],
    "do_not_specialize_on_alignment": ["table_ptr"],
}


@triton.jit
def _slots(positions, table_rows, limits, num_blocks, mask, BLOCK_SIZE: tl.constexpr):
    """Each position's slot; at the same offset of the null block where the position has none."""
    block = tl.minimum(positions // BLOCK_SIZE, num_blocks - 1)
    number = tl.load(table_rows + block, mask=mask & (positions < limits), other=0)
    return number * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit(**SPECIALIZATION)
def _verify_rows(
    token_ids_ptr, starts_ptr, guesses_ptr, sources_ptr, limits_ptr, table_ptr,
    state_tokens_ptr, state_accepted_ptr, state_guesses_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr, seeds_ptr,
    row_ids_ptr, positions_ptr, slots_ptr, taken_guesses_ptr, row_starts_ptr, seq_lens_ptr,
    row_temperature_ptr, row_top_k_ptr, row_top_p_ptr, row_log_min_p_ptr, row_seeds_ptr, places_ptr,
    start_stride, limit_stride, guess_stride, token_stride, state_guess_stride, table_stride, num_blocks,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, GUESSES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    NO_GUESS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: everything of request n. ROWS and COLUMNS: powers of two not below WIDTH and GUESSES."""
    n = tl.program_id(0).to(tl.int64)
    w, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_guess = w < WIDTH, column < GUESSES
    wait(PDL)
    source = tl.load(sources_ptr + n).to(tl.int64)
    limit = tl.load(limits_ptr + n * limit_stride)
    pending, real = source >= 0, limit != 0
    accepted = tl.load(state_accepted_ptr + source, mask=pending, other=0).to(tl.int64)
    token = tl.load(state_tokens_ptr + source * token_stride + accepted, mask=pending, other=0)
    token = tl.where(pending, token, tl.load(token_ids_ptr + n))
    start = tl.where(real, tl.load(starts_ptr + n * start_stride) + accepted, 0)

    from_state = state_guesses_ptr + source * state_guess_stride
    from_host = guesses_ptr + n * guess_stride
    guess = tl.load(from_state + column, mask=is_guess & pending, other=0)
    guess += tl.load(from_host + column, mask=is_guess & (source < 0), other=0)
    guess = tl.where(start + 1 + column < limit, guess, NO_GUESS)
    tl.store(taken_guesses_ptr + n * GUESSES + column, guess, mask=is_guess)
    guessed = (w > 0) & is_row
    guess = tl.load(from_state + w - 1, mask=guessed & pending, other=0)
    guess += tl.load(from_host + w - 1, mask=guessed & (source < 0), other=0)
    guess = tl.where(start + w < limit, guess, NO_GUESS)
    row_id = tl.where(w == 0, token, tl.maximum(guess, 0))
    position = tl.where(real, start + w, 0)

    at = n * WIDTH + w
    tl.store(row_ids_ptr + at, tl.where(real, row_id, 0), mask=is_row)
    tl.store(positions_ptr + at, position, mask=is_row)
    slot = _slots(position, table_ptr + n * table_stride, limit, num_blocks, is_row, BLOCK_SIZE)
    tl.store(slots_ptr + at, slot, mask=is_row)
    tl.store(row_starts_ptr + n, start)
    tl.store(seq_lens_ptr + n, tl.where(real, start + WIDTH, 0).to(tl.int32))
    temperature = tl.where(real, tl.load(temperature_ptr + n), 0.0)
    tl.store(row_temperature_ptr + at, temperature + tl.zeros([ROWS], tl.float32), mask=is_row)
    whole = tl.zeros([ROWS], tl.int32)
    tl.store(row_top_k_ptr + at, tl.load(top_k_ptr + n + whole), mask=is_row)
    tl.store(row_top_p_ptr + at, tl.load(top_p_ptr + n + whole), mask=is_row)
    tl.store(row_log_min_p_ptr + at, tl.load(log_min_p_ptr + n + whole), mask=is_row)
    tl.store(row_seeds_ptr + at, tl.load(seeds_ptr + n + whole), mask=is_row)
    tl.store(places_ptr + at, position + 1, mask=is_row)


@triton.jit(**SPECIALIZATION)
def _accept(
    tokens_ptr, guesses_ptr, starts_ptr, row_lens_ptr,
    state_tokens_ptr, state_accepted_ptr, state_matched_ptr, state_guesses_ptr,
    last_ptr, positions_ptr, seq_lens_ptr,
    start_stride, guess_stride, token_stride, state_guess_stride,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COMPARED: tl.constexpr, GUESSES: tl.constexpr, COLUMNS: tl.constexpr,
    NO_GUESS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program n: request n. COMPARED: guesses that have a drawn token to be compared with. COLUMNS: as above."""
    n = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, ROWS)
    is_row, compared = w < WIDTH, w < COMPARED
    wait(PDL)
    tokens = tl.load(tokens_ptr + n * WIDTH + w, mask=is_row, other=0)
    guesses = tl.load(guesses_ptr + n * guess_stride + w, mask=compared, other=0)
    matched = tl.min(tl.where(compared & (guesses == tokens), ROWS, w), 0)
    accepted = tl.minimum(matched, WIDTH - 1)
    tl.store(state_tokens_ptr + n * token_stride + w, tokens, mask=is_row)
    tl.store(state_accepted_ptr + n, accepted)
    tl.store(state_matched_ptr + n, matched)
    column = tl.arange(0, COLUMNS)
    none = tl.full([COLUMNS], NO_GUESS, tl.int64)
    tl.store(state_guesses_ptr + n * state_guess_stride + column, none, mask=column < GUESSES)
    position = tl.load(starts_ptr + n * start_stride) + accepted
    tl.store(last_ptr + n, n * WIDTH + accepted)
    tl.store(positions_ptr + n, position)
    real = tl.load(row_lens_ptr + n) != 0
    tl.store(seq_lens_ptr + n, tl.where(real, position + 1, 0).to(tl.int32))


@triton.jit(
    do_not_specialize=["count", *SPECIALIZATION["do_not_specialize"]], do_not_specialize_on_alignment=["table_ptr"]
)
def _next_place(
    positions_ptr, lens_ptr, table_ptr, limits_ptr, next_positions_ptr, next_lens_ptr, slots_ptr,
    count, limit_stride, table_stride, num_blocks, BLOCK_SIZE: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    here = n < count
    wait(PDL)
    length = tl.load(lens_ptr + n, mask=here, other=0)
    step = (length > 0).to(tl.int32)
    position = tl.load(positions_ptr + n, mask=here, other=0) + step
    limit = tl.load(limits_ptr + n.to(tl.int64) * limit_stride, mask=here, other=0)
    slot = _slots(position, table_ptr + n.to(tl.int64) * table_stride, limit, num_blocks, here, BLOCK_SIZE)
    tl.store(next_positions_ptr + n, position, mask=here)
    tl.store(next_lens_ptr + n, length + step, mask=here)
    tl.store(slots_ptr + n, slot, mask=here)


def verify_rows(requests, state, sampling_N, width: int, block_size: int) -> VerifyRows:
    """The rows of a step of `width` rows a request. Places of sampling_N are not looked at: a row's is position + 1.

    requests, state, sampling_N: as engine.verify's StepRequests and CommittedTokens, and sampling.SamplingRows, whose
    tensors are contiguous; rows of guesses, table and state, and starts and limits may lie apart. Guesses of positions
    without a slot are none, and a missing guess is token 0. Rows of a padding request: token 0 at position 0, slot 0,
    temperature 0. Raises ValueError for other vectors whose numbers lie apart.
    """
    count, guesses = requests.guesses_NK.shape
    device = requests.token_ids_N.device

    def new(like: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=like.dtype, device=device)

    host = (sampling_N.temperature, sampling_N.top_k, sampling_N.top_p, sampling_N.log_min_p, sampling_N.seeds)
    whole = (requests.token_ids_N, requests.starts_N)
    _check_contiguous(requests.token_ids_N, requests.sources_N, *host)
    ids_M, positions_M, slots_M, places_M = (new(requests.starts_N, count * width) for _ in range(4))
    guesses_NK, starts_N = new(requests.guesses_NK, count, guesses), new(requests.starts_N, count)
    seq_lens_N = torch.empty(count, dtype=torch.int32, device=device)
    rows = tuple(new(values_N, count * width) for values_N in host)
    _verify_rows[count,](
        *whole, requests.guesses_NK, requests.sources_N, requests.limits_N, requests.table_NB,
        state.tokens_SW, state.accepted_S, state.guesses_SK, *host,
        ids_M, positions_M, slots_M, guesses_NK, starts_N, seq_lens_N, *rows, places_M,
        requests.starts_N.stride(0), requests.limits_N.stride(0), requests.guesses_NK.stride(0),
        state.tokens_SW.stride(0), state.guesses_SK.stride(0),
        requests.table_NB.stride(0), requests.table_NB.shape[1],
        WIDTH=width, ROWS=triton.next_power_of_2(width), GUESSES=guesses,
        COLUMNS=triton.next_power_of_2(max(guesses, 1)), BLOCK_SIZE=block_size,
        NO_GUESS=NO_GUESS, num_warps=1, **launch_options(device),
    )  # fmt: skip
    names = ("temperature", "top_k", "top_p", "log_min_p", "seeds")
    sampling = replace(sampling_N, **dict(zip(names, rows, strict=True)), places=places_M)
    return VerifyRows(ids_M, positions_M, slots_M, guesses_NK, starts_N, seq_lens_N, sampling)


def accept(tokens_M: torch.Tensor, rows: VerifyRows, state) -> Accepted:
    """Writes tokens, accepted and matched of the first N rows of the state, an engine.verify.CommittedTokens, which
    have no guesses from then on.

    tokens_M int64: the target's own tokens, drawn at every row."""
    count = rows.starts_N.shape[0]
    width = tokens_M.shape[0] // count
    guesses = rows.guesses_NK.shape[1]
    _check_contiguous(tokens_M, rows.seq_lens_N)
    last_N, positions_N = (torch.empty(count, dtype=torch.int64, device=tokens_M.device) for _ in range(2))
    seq_lens_N = torch.empty_like(rows.seq_lens_N)
    _accept[count,](
        tokens_M, rows.guesses_NK, rows.starts_N, rows.seq_lens_N, state.tokens_SW, state.accepted_S, state.matched_S,
        state.guesses_SK, last_N, positions_N, seq_lens_N, rows.starts_N.stride(0), rows.guesses_NK.stride(0),
        state.tokens_SW.stride(0), state.guesses_SK.stride(0), WIDTH=width, ROWS=triton.next_power_of_2(width),
        COMPARED=min(width, guesses), GUESSES=guesses, COLUMNS=triton.next_power_of_2(max(guesses, 1)),
        NO_GUESS=NO_GUESS, num_warps=1, **launch_options(tokens_M.device),
    )  # fmt: skip
    return Accepted(last_N, positions_N, seq_lens_N)


def next_place(
    positions_N: torch.Tensor,
    seq_lens_N: torch.Tensor,
    table_NB: torch.Tensor,
    limits_N: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions int64, seq_lens int32, slots int64), each [N], of the position after; padding stays where it is."""
    count = positions_N.shape[0]
    _check_contiguous(positions_N, seq_lens_N)
    next_N, slots_N = torch.empty_like(positions_N), torch.empty_like(positions_N)
    lens_N = torch.empty_like(seq_lens_N)
    _next_place[triton.cdiv(count, _PLACES),](
        positions_N, seq_lens_N, table_NB, limits_N, next_N, lens_N, slots_N, count, limits_N.stride(0),
        table_NB.stride(0), table_NB.shape[1], BLOCK_SIZE=block_size, PLACES=_PLACES, num_warps=2,
        **launch_options(positions_N.device),
    )  # fmt: skip
    return next_N, lens_N, slots_N


def _check_contiguous(*vectors: torch.Tensor) -> None:
    if not all(vector.is_contiguous() for vector in vectors):
        raise ValueError("the numbers of a step's vector lie apart; make it contiguous before the call")


def compile_cases(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constants, options): plain steps and those of 3 and of 15 guesses."""
    kinds = {name: "*i64" for kernel in (_verify_rows, _accept, _next_place) for name in kernel.arg_names}
    kinds = {name: kind for name, kind in kinds.items() if name.endswith("_ptr")}
    ints = ("sources", "state_accepted", "state_matched", "seq_lens", "row_lens", "lens", "next_lens")
    ints += ("top_k", "row_top_k")
    reals = ("temperature", "top_p", "log_min_p")
    kinds |= {f"{name}_ptr": "*i32" for name in ints}
    kinds |= {f"{prefix}{name}_ptr": "*fp32" for name in reals for prefix in ("", "row_")}
    kinds |= dict.fromkeys(("count", *SPECIALIZATION["do_not_specialize"]), "i32")
    pdl, warps = {"PDL": capability >= (9, 0)}, {"num_warps": 1}
    cases = []
    for width, guesses in ((1, 0), (1, 3), (4, 3), (16, 15)):
        rows = {"WIDTH": width, "ROWS": triton.next_power_of_2(width)} | pdl
        columns = {"GUESSES": guesses, "COLUMNS": triton.next_power_of_2(max(guesses, 1)), "BLOCK_SIZE": 64}
        columns |= {"NO_GUESS": NO_GUESS}
        compared = {name: value for name, value in columns.items() if name != "BLOCK_SIZE"}
        compared |= {"COMPARED": min(width, guesses)}
        cases.append((f"verify_rows {width} of {guesses}", _verify_rows, kinds, rows | columns, warps))
        cases.append((f"accept {width} of {guesses}", _accept, kinds, rows | compared, warps))
    places = {"BLOCK_SIZE": 64, "PLACES": _PLACES} | pdl
    return [*cases, ("next_place", _next_place, kinds, places, {"num_warps": 2})]
