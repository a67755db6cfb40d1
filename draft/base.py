"""What a draft model must do to guess the target's next tokens, and the loop that makes it guess several.

A draft keeps a KV cache of its own under the target's slots. The entry at position t comes from the target's features
of token t and the embedding of token t + 1; entries made from the draft's own states, while it guesses ahead, are
written again from the target's features once those are known.

Shape letters: T rows of a target step, N requests, F features a row = layers captured x D, D draft width, K guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import ForwardBatch


@dataclass(frozen=True)
class TargetShape:
    """What a draft must fit. num_layers: the target's decoder layers."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass
class DraftRows:
    """Rows whose KV is in the draft's cache, with what the rest of the layer needs of them.

    x: the layer's input after its norms, [T, 2 D]. residual_TD: what attention's output is added to.
    """

    x: torch.Tensor
    residual_TD: torch.Tensor

    def select(self, rows_N: torch.Tensor) -> DraftRows:
        return DraftRows(self.x.index_select(0, rows_N), self.residual_TD.index_select(0, rows_N))


class Drafter(Protocol):
    """feature_layers: the states that `extend` wants, each the residual stream as it enters that target layer (the
    number of layers: as it leaves the last), in order. cache_width: numbers a token in its cache. max_positions: tokens
    at or beyond it are not guessed well. weight_bytes: of its own weights, the target's left out. All methods may be
    captured in a CUDA graph if `is_capturable`.
    """

    name: str
    feature_layers: tuple[int, ...]
    cache_width: int
    max_positions: int
    weight_bytes: int
    is_capturable: bool

    def extend(
        self, features_TF: torch.Tensor, next_ids_T: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> DraftRows:
        """Writes the KV of the batch's rows. next_ids_T: the token after each row's, int64; token ids of the batch are
        not looked at. The batch's dispatcher replicates tokens. cache: [blocks, block_size, cache_width]."""

    def predict(self, rows: DraftRows, batch: ForwardBatch, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One row a request, whose KV is written: (guessed target token ids int64 [N], hidden [N, D] for `follow`).

        batch: query length 1, positions of these rows, seq_lens_N up to and including them, 0 for padding."""

    def follow(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> DraftRows:
        """Writes the KV of the positions after: `batch` has been moved on to them, the guessed tokens follow them."""


def propose(
    drafter: Drafter,
    rows: DraftRows,
    batch: ForwardBatch,
    cache: torch.Tensor,
    count: int,
    advance: Callable[[ForwardBatch], ForwardBatch],
) -> torch.Tensor:
    """A chain of `count` guesses for each request, int64 [N, count]. `advance` moves a batch on by one position."""
    guesses = []
    while True:
        token_ids_N, hidden_ND = drafter.predict(rows, batch, cache)
        guesses.append(token_ids_N)
        if len(guesses) == count:
            return torch.stack(guesses, dim=1)
        batch = advance(batch)
        rows = drafter.follow(hidden_ND, token_ids_N, batch, cache)
