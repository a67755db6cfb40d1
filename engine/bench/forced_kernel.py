"""The given accept lengths on a GPU, in one launch, so that they cost no more than finding them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.verify_rows import NO_GUESS, Accepted, VerifyRows


@triton.jit
def _force(
    pattern_ptr, place_ptr, guesses_ptr, starts_ptr, accepted_ptr, matched_ptr, last_ptr, positions_ptr, lens_ptr,
    count, guess_stride,
    PLACES: tl.constexpr, REQUESTS: tl.constexpr, COMPARED: tl.constexpr, WIDTH: tl.constexpr, NO_GUESS: tl.constexpr,
):  # fmt: skip
    """One program for all requests, so that the place moves on once."""
    n = tl.arange(0, REQUESTS)
    here = n < count
    place = tl.load(place_ptr)
    drawn = tl.load(pattern_ptr + (place + n) % PLACES, mask=here, other=0)
    there = tl.full([REQUESTS], COMPARED, tl.int64)
    for back in tl.static_range(COMPARED):
        column = COMPARED - 1 - back
        guess = tl.load(guesses_ptr + n * guess_stride + column, mask=here, other=0)
        there = tl.where(guess == NO_GUESS, column, there)
    drawn = tl.minimum(drawn, there)
    accepted = tl.minimum(drawn, WIDTH - 1)
    position = tl.load(starts_ptr + n, mask=here, other=0) + accepted
    length = tl.load(lens_ptr + n, mask=here, other=0)
    tl.store(accepted_ptr + n, accepted.to(tl.int32), mask=here)
    tl.store(matched_ptr + n, drawn.to(tl.int32), mask=here)
    tl.store(last_ptr + n, n * WIDTH + accepted, mask=here)
    tl.store(positions_ptr + n, position, mask=here)
    tl.store(lens_ptr + n, tl.where(length > 0, position + 1, 0).to(tl.int32), mask=here)
    tl.debug_barrier()
    tl.store(place_ptr, place + count)


def force(
    pattern_P: torch.Tensor, place_1: torch.Tensor, rows: VerifyRows, state: Any, found: Accepted, width: int
) -> None:
    """As `forced._force_plainly`: what was found is replaced in place."""
    count = found.last_N.shape[0]
    _force[(1,)](
        pattern_P, place_1, rows.guesses_NK, rows.starts_N, state.accepted_S, state.matched_S, found.last_N,
        found.positions_N, found.seq_lens_N, count, rows.guesses_NK.stride(0), PLACES=pattern_P.shape[0],
        REQUESTS=triton.next_power_of_2(count), COMPARED=min(width, rows.guesses_NK.shape[1]), WIDTH=width,
        NO_GUESS=NO_GUESS, num_warps=1,
    )  # fmt: skip
