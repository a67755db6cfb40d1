"""EAGLE-3 as a Drafter (Li et al. 2025, section 3.1): fuse the target's features, one layer, its head.

Shape letters: T rows, N requests, F features a row, D draft width.
"""

from __future__ import annotations

import torch

from draft.base import DraftRows
from draft.eagle3.model import Eagle3Model
from draft.eagle3.zeros import Zeros
from engine.batch import ForwardBatch
from engine.comm.collectives import are_capturable
from engine.layers.embedding import Embedding, LMHead


class Eagle3Drafter:
    """embed and head: the draft's own or the target's. All sums over ranks are the dispatcher's `reduce`."""

    name = "eagle3"

    def __init__(self, model: Eagle3Model, feature_layers: tuple[int, ...], embed: Embedding, head: LMHead):
        self.model, self.feature_layers, self.embed, self.head = model, feature_layers, embed, head
        self.zeros = Zeros(model.dtype, model.parallel.device)
        self.cache_width = model.self_attn.cache_width
        self.max_positions = model.config.max_positions
        self.weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.is_capturable = model.self_attn.is_capturable and are_capturable(model.parallel)

    def extend(
        self, features_TF: torch.Tensor, next_ids_T: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> DraftRows:
        partial_TD = self.model.fuse(features_TF)
        normed_TD, hidden_TD = batch.dispatcher.reduce(
            partial_TD, self.zeros(next_ids_T.shape[0], self.model.config.hidden_size), self.model.hidden_norm
        )
        return self._write(normed_TD, hidden_TD, next_ids_T, batch, cache)

    def predict(self, rows: DraftRows, batch: ForwardBatch, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        model, reduce = self.model, batch.dispatcher.reduce
        partial_ND = model.self_attn.attend(rows.x, batch, cache)
        x_ND, residual_ND = reduce(partial_ND, rows.residual_TD, model.post_attention_layernorm)
        normed_ND, hidden_ND = reduce(model.mlp.partial(x_ND), residual_ND, model.norm)
        token_ids_N = model.vocabulary(self.head.argmax(normed_ND))
        return token_ids_N, normed_ND if model.config.norm_output else hidden_ND

    def follow(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> DraftRows:
        return self._write(self.model.hidden_norm(hidden_ND), hidden_ND, token_ids_N, batch, cache)

    def _write(
        self,
        normed_TD: torch.Tensor,
        hidden_TD: torch.Tensor,
        next_ids_T: torch.Tensor,
        batch: ForwardBatch,
        cache: torch.Tensor,
    ) -> DraftRows:
        embedded_TD = self.embed.partial(next_ids_T)
        embedded_TD, _ = batch.dispatcher.reduce(
            embedded_TD, self.zeros(next_ids_T.shape[0], self.model.config.hidden_size), self.model.input_layernorm
        )
        x = torch.cat((embedded_TD, normed_TD), dim=-1)
        self.model.self_attn.write(x, batch, cache)
        return DraftRows(x, normed_TD if self.model.config.norm_before_residual else hidden_TD)
