"""From a step's logits to committed tokens, and to the draft's guesses of those after: sample, accept, extend, propose.

The same for steps that are captured and for those computed once. Without a draft nothing but tokens comes of it.

Shape letters: T rows of the step, N requests, W rows of each that are drawn from, M = N x W, F features a row,
K guesses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

import draft.base
from draft.base import Drafter
from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher
from engine.comm.meter import OTHER, CommMeter
from engine.verify import Accepted, CommittedTokens, StepRequests, VerifyRows


class Forwarded(NamedTuple):
    """What the target made of a step's T rows: its features where a draft wants them, and logits of the M rows that are
    drawn from. rows_M: which rows of the step those are; None: all, in order. next_ids_T: the token after each row's,
    0 where it is to be drawn; None where each is. num_real_1: requests that are no padding, int32 [1]."""

    batch: ForwardBatch
    logits_MV: torch.Tensor
    features_TF: torch.Tensor | None
    rows_M: torch.Tensor | None
    next_ids_T: torch.Tensor | None
    num_real_1: torch.Tensor


class SampledStep:
    """sample_ops, verify_ops: what has `greedy`, `draw` and `verify_rows`, `accept`, `next_place` for the device."""

    def __init__(
        self,
        state: CommittedTokens,
        block_size: int,
        sample_ops: Any,
        verify_ops: Any,
        drafter: Drafter | None = None,
        dispatcher: TokenDispatcher | None = None,
        meter: CommMeter | None = None,
    ):
        self.state, self.block_size = state, block_size
        self.sample_ops, self.verify_ops = sample_ops, verify_ops
        self.drafter, self.dispatcher = drafter, dispatcher
        self._meter = meter or CommMeter()
        self.cache: torch.Tensor | None = None

    def __call__(
        self, forwarded: Forwarded, requests: StepRequests, rows: VerifyRows, num_propose: int, draws: bool = True
    ) -> None:
        """Leaves tokens, accepted, matched and guesses in the state. `draws`: some request is not greedy."""
        tokens_M = torch.empty(forwarded.logits_MV.shape[0], dtype=torch.int64, device=forwarded.logits_MV.device)
        maxima_M = self.sample_ops.greedy(forwarded.logits_MV, tokens_M)
        if draws:
            self.sample_ops.draw(forwarded.logits_MV, maxima_M, rows.sampling, tokens_M)
        accepted = self.verify_ops.accept(tokens_M, rows, self.state)
        if self.drafter is None:
            return
        with self._meter.all_as(OTHER):  # none of the target's rounds
            self._guess(forwarded, tokens_M, requests, accepted, num_propose)

    def extend(self, forwarded: Forwarded) -> draft.base.DraftRows:
        """The draft's KV of a step that draws from none of its rows, as a part of a long prompt."""
        with self._meter.all_as(OTHER):
            return self._extend(forwarded, forwarded.next_ids_T)

    def _extend(self, forwarded: Forwarded, next_ids_T: torch.Tensor) -> draft.base.DraftRows:
        batch = replace(forwarded.batch, dispatcher=self.dispatcher)
        return self.drafter.extend(forwarded.features_TF, next_ids_T, batch, self.cache)

    def _guess(
        self,
        forwarded: Forwarded,
        tokens_M: torch.Tensor,
        requests: StepRequests,
        accepted: Accepted,
        num_propose: int,
    ) -> None:
        next_ids_T, last_N = tokens_M, accepted.last_N
        if forwarded.rows_M is not None:
            next_ids_T = forwarded.next_ids_T.index_copy(0, forwarded.rows_M, tokens_M)
            last_N = forwarded.rows_M[last_N]
        rows = self._extend(forwarded, next_ids_T)
        if num_propose:
            batch = self._chain_batch(forwarded, requests, accepted)
            advance = self._advance_of(requests)
            self.state.guesses_SK[: len(last_N), :num_propose] = draft.base.propose(
                self.drafter, rows.select(last_N), batch, self.cache, num_propose, advance
            )

    def _chain_batch(self, forwarded: Forwarded, requests: StepRequests, accepted: Accepted) -> ForwardBatch:
        """One row a request: that of its last committed token."""
        count, device = len(accepted.last_N), accepted.last_N.device
        return self._with_lengths(
            ForwardBatch(
                token_ids_T=None,
                positions_T=accepted.positions_N,
                slots_T=None,  # its KV is written
                block_table_NB=requests.table_NB,
                query_lens=None,
                seq_lens=None,
                dispatcher=self.dispatcher,
                query_starts_N1=torch.arange(count + 1, dtype=torch.int32, device=device),
                seq_lens_N=accepted.seq_lens_N,
                num_tokens_1=forwarded.num_real_1,
                max_query_len=1,
            )
        )

    def _advance_of(self, requests: StepRequests):
        def advance(batch: ForwardBatch) -> ForwardBatch:
            positions_N, seq_lens_N, slots_N = self.verify_ops.next_place(
                batch.positions_T, batch.seq_lens_N, requests.table_NB, requests.limits_N, self.block_size
            )
            return self._with_lengths(replace(batch, positions_T=positions_N, seq_lens_N=seq_lens_N, slots_T=slots_N))

        return advance

    def _with_lengths(self, batch: ForwardBatch) -> ForwardBatch:
        """With the host's lists where the draft's attention wants them, as the plain one does."""
        if self.drafter.is_capturable:
            return batch
        seq_lens = batch.seq_lens_N.tolist()
        return replace(batch, query_lens=[1] * len(seq_lens), seq_lens=seq_lens)
