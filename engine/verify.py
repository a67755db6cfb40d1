"""A verify step's bookkeeping in plain tensors: which rows it has, which guesses it accepts, what comes after.

A request's rows are its last committed token and W - 1 guesses of the tokens after it. The target's own token is drawn
at every row, with noise keyed by (seed, position), and a guess is accepted while it equals the token drawn before it:
what is committed is what plain decoding would have drawn (variant three of Leviathan et al. 2023, section 2.3, for
guesses that are not drawn). These are the twins of kernels/gpu/verify.py.

Shape letters: N requests, W rows a request, M = N x W rows in request order, K columns for guesses (at least W - 1, one
more is compared where it is there), S rows of the state, B blocks a request may hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.kernels.verify_rows import NO_GUESS, Accepted, VerifyRows
from engine.sampling import SamplingRows

__all__ = [
    "NO_GUESS",
    "Accepted",
    "CommittedTokens",
    "StepRequests",
    "VerifyRows",
    "accept",
    "next_place",
    "verify_rows",
]


@dataclass
class CommittedTokens:
    """What the last step left for each of its requests: the input of the next before the host knows it.

    tokens_SW: int64, the tokens drawn; the first accepted + 1 of them are committed. accepted_S: int32, the guesses
    accepted. matched_S: int32, leading guesses that equal the tokens drawn, one beyond those verified included.
    guesses_SK: int64, of the tokens after the committed ones, NO_GUESS where there is none.
    """

    tokens_SW: torch.Tensor
    accepted_S: torch.Tensor
    matched_S: torch.Tensor
    guesses_SK: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, num_guesses: int, device: torch.device) -> CommittedTokens:
        return cls(
            torch.zeros(num_rows, num_guesses + 1, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.full((num_rows, num_guesses), NO_GUESS, dtype=torch.int64, device=device),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.tokens_SW, self.accepted_S, self.matched_S, self.guesses_SK

    def rows(self, count: int) -> CommittedTokens:
        """The first of them, in place."""
        return CommittedTokens(*(tensor[:count] for tensor in self.tensors))


class StepRequests(NamedTuple):
    """What the host says of N requests. token_ids_N int64: the last committed token; starts_N int64: its position, and
    guesses_NK int64: as the host knows them; where sources_N (int32) names a row of the state, its token and guesses
    take their place, and its `accepted` is added to the position. limits_N int64: positions at or beyond it have no
    slot, 0 for a padding request. table_NB int64: block numbers."""

    token_ids_N: torch.Tensor
    starts_N: torch.Tensor
    guesses_NK: torch.Tensor
    sources_N: torch.Tensor
    limits_N: torch.Tensor
    table_NB: torch.Tensor


def verify_rows(
    requests: StepRequests, state: CommittedTokens, sampling_N: SamplingRows, width: int, block_size: int
) -> VerifyRows:
    """The rows of a step of `width` rows a request.

    Places of sampling_N are not looked at: a row's is position + 1. Guesses of positions without a slot are none, and a
    missing guess is token 0. Rows of a padding request: token 0 at position 0, slot 0, temperature 0.
    """
    pending_N = requests.sources_N >= 0
    sources_N = requests.sources_N.clamp(min=0).long()
    accepted_N = state.accepted_S[sources_N].long()
    last_N = state.tokens_SW[sources_N, accepted_N]
    token_ids_N = torch.where(pending_N, last_N, requests.token_ids_N)
    starts_N = requests.starts_N + torch.where(pending_N, accepted_N, 0)
    guesses_NK = torch.where(pending_N[:, None], state.guesses_SK[sources_N], requests.guesses_NK)
    places_NK = starts_N[:, None] + torch.arange(1, guesses_NK.shape[1] + 1, device=starts_N.device)
    guesses_NK = guesses_NK.masked_fill(places_NK >= requests.limits_N[:, None], NO_GUESS)
    is_padding_N = requests.limits_N == 0
    token_ids_NW = torch.cat([token_ids_N[:, None], guesses_NK[:, : width - 1].clamp(min=0)], dim=1)
    token_ids_NW = token_ids_NW.masked_fill(is_padding_N[:, None], 0)
    starts_N = starts_N.masked_fill(is_padding_N, 0)
    positions_NW = starts_N[:, None] + torch.arange(width, device=starts_N.device)
    positions_NW = positions_NW.masked_fill(is_padding_N[:, None], 0)
    slots_NW = slots_of(positions_NW, requests.table_NB, requests.limits_N, block_size)
    seq_lens_N = (starts_N + width).masked_fill(is_padding_N, 0).int()

    def each(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.repeat_interleave(width)

    sampling = SamplingRows(
        temperature=each(sampling_N.temperature.masked_fill(is_padding_N, 0.0)),
        top_k=each(sampling_N.top_k),
        top_p=each(sampling_N.top_p),
        log_min_p=each(sampling_N.log_min_p),
        seeds=each(sampling_N.seeds),
        places=positions_NW.flatten() + 1,
    )
    return VerifyRows(
        token_ids_NW.flatten(), positions_NW.flatten(), slots_NW.flatten(), guesses_NK, starts_N, seq_lens_N, sampling
    )


def slots_of(
    positions_NW: torch.Tensor, table_NB: torch.Tensor, limits_N: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots int64 [N, W]; in the null block, at the same offset, for positions that have none."""
    blocks_NW = (positions_NW // block_size).clamp(max=table_NB.shape[1] - 1)
    numbers_NW = table_NB.gather(1, blocks_NW).masked_fill(positions_NW >= limits_N[:, None], 0)
    return numbers_NW * block_size + positions_NW % block_size


def accept(tokens_M: torch.Tensor, rows: VerifyRows, state: CommittedTokens) -> Accepted:
    """Writes tokens, accepted and matched of the first N rows of the state, which have no guesses from then on."""
    num_requests = rows.starts_N.shape[0]
    tokens_NW = tokens_M.view(num_requests, -1)
    width = tokens_NW.shape[1]
    compared = min(width, rows.guesses_NK.shape[1])
    equal_NK = rows.guesses_NK[:, :compared] == tokens_NW[:, :compared]
    matched_N = equal_NK.int().cumprod(dim=1).sum(dim=1)
    accepted_N = matched_N.clamp(max=width - 1)
    state.tokens_SW[:num_requests, :width] = tokens_NW
    state.accepted_S[:num_requests] = accepted_N
    state.matched_S[:num_requests] = matched_N
    state.guesses_SK[:num_requests] = NO_GUESS
    positions_N = rows.starts_N + accepted_N
    seq_lens_N = (positions_N + 1).masked_fill(rows.seq_lens_N == 0, 0).int()
    first_N = torch.arange(num_requests, device=tokens_M.device) * width
    return Accepted(first_N + accepted_N, positions_N, seq_lens_N)


def next_place(
    positions_N: torch.Tensor,
    seq_lens_N: torch.Tensor,
    table_NB: torch.Tensor,
    limits_N: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(positions int64, seq_lens int32, slots int64), each [N], of the position after; padding stays where it is."""
    real_N = seq_lens_N > 0
    positions_N = positions_N + real_N
    slots_N = slots_of(positions_N[:, None], table_NB, limits_N, block_size)[:, 0]
    return positions_N, seq_lens_N + real_N.int(), slots_N
