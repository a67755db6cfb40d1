"""A step of any kind cut at its attentions: pieces that run on the device alone, in fixed places, so that each can be
captured; between them attention, which reads the host's lists and runs on the step's real rows.

Shape letters: T rows, padding included, t those this rank holds between attentions, D model width, F features a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.comm.dispatcher import TokenDispatcher

SIZES = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Rows of the steps whose pieces are captured. Beyond them the device takes longer than the host's launches."""

MOST_QUERY_ROWS = 384
"""Steps up to so many rows make all queries in their pieces: twice, but the host has fewer kernels to launch between
them. In larger ones the device needs longer than the host's launches."""


class ChunkStep:
    """The pieces of steps of up to `most_rows` rows: piece 0 leads from the tokens to the first attention, piece i from
    attention i - 1 to attention i, the last one to the final norm.

    What pieces and attention hand each other lies in places that all layers and all numbers of rows share. Padding rows
    hold token 0 at position 0 of block 0, which no sequence owns; `num_tokens_1` tells where they begin.
    model: with `rotary`, `before_attention`, `attention`, `after_attention`, `features` and `attention_places` as
    models.kimi_k25.model has them. dispatcher_of(rows): the dispatcher of a step of so many rows.
    """

    def __init__(
        self,
        model: Any,
        dispatcher_of: Callable[[int], TokenDispatcher],
        caches: torch.Tensor,
        feature_layers: Sequence[int],
        most_rows: int,
    ):
        self._model, self._dispatcher_of, self._caches = model, dispatcher_of, caches
        self._feature_layers = tuple(feature_layers)
        device = caches.device
        self._ids_3T = torch.zeros(3, most_rows, dtype=torch.int64, device=device)
        self._num_tokens_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self._inputs, self._out_THV = model.attention_places(most_rows, min(most_rows, MOST_QUERY_ROWS))
        width = model.config.hidden_size
        self._x_TD = self._out_THV.new_zeros(most_rows, width)
        self._features_TF = None
        if self._feature_layers:
            self._features_TF = self._out_THV.new_zeros(most_rows, width * len(self._feature_layers))

    @classmethod
    def of(cls, runner: Any, sizes: Sequence[int]) -> ChunkStep:
        """For a model runner's steps of these numbers of rows, over its caches."""
        layers = runner.feature_layers
        return cls(runner.model, runner.dispatchers.for_rows, runner.caches, layers, max(sizes, default=0))

    @property
    def num_layers(self) -> int:
        return self._caches.shape[0]

    def fill(self, batch: ForwardBatch, num_rows: int) -> None:
        """Brings a step's tokens, and padding behind them up to num_rows."""
        count = batch.token_ids_T.shape[0]
        for place_T, values_T in zip(self._ids_3T, (batch.token_ids_T, batch.positions_T, batch.slots_T), strict=True):
            place_T[:count].copy_(values_T)
        self._ids_3T[:, count:num_rows].zero_()
        self._out_THV[count:num_rows].zero_()  # which attention leaves alone: else a broken step's numbers would stay
        self._num_tokens_1.copy_(batch.num_tokens_1)

    def batch(self, num_rows: int) -> ForwardBatch:
        """What the pieces read; attention's part of it is not there."""
        token_ids_T, positions_T, slots_T = self._ids_3T[:, :num_rows].unbind()
        return ForwardBatch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slots_T=slots_T,
            block_table_NB=None,
            query_lens=None,
            seq_lens=None,
            dispatcher=self._dispatcher_of(num_rows),
            num_tokens_1=self._num_tokens_1,
        )

    def first(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Piece 0 -> (rotary angles of all rows, residual [t, D])."""
        cis = self._model.rotary(batch.positions_T)
        return cis, self._leave(self._model.before_attention(cis, batch, self._caches, self._makes_queries(batch)))

    def after(
        self,
        index: int,
        cis: torch.Tensor,
        residual_tD: torch.Tensor,
        entering: dict[int, torch.Tensor],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """The piece after attention `index` -> residual [t, D]. entering: the residual that entered each feature layer
        up to there, for the last piece."""
        out_THV = self._out_THV[: batch.token_ids_T.shape[0]]
        between = self._model.after_attention(
            index, out_THV, residual_tD, cis, batch, self._caches, self._makes_queries(batch)
        )
        if index + 1 == self.num_layers and self._features_TF is not None:
            entered = entering | {self.num_layers: between.residual_tD}
            features_TF = self._model.features([entered[layer] for layer in self._feature_layers], batch)
            self._features_TF[: features_TF.shape[0]].copy_(features_TF)
        return self._leave(between)

    def _leave(self, between: Any) -> torch.Tensor:
        """Puts what comes next where it is looked for."""
        places, values = (self._x_TD,), (between.x_TD,)
        if between.inputs is not None:
            places, values = self._inputs, between.inputs
        for place, value in zip(places, values, strict=True):
            if value is not None:
                place[: value.shape[0]].copy_(value)
        return between.residual_tD

    def enters_feature_layer(self, index: int) -> bool:
        return index in self._feature_layers

    @staticmethod
    def _makes_queries(batch: ForwardBatch) -> bool:
        return batch.token_ids_T.shape[0] <= MOST_QUERY_ROWS

    def attention(self, cis: torch.Tensor, batch: ForwardBatch) -> Callable[[int], None]:
        """Computes attention `index` of a step's real rows, at once. cis: angles of all rows, padding included."""
        count = batch.token_ids_T.shape[0]
        made = self._inputs if cis.shape[0] <= MOST_QUERY_ROWS else self._inputs[:2]
        inputs = type(self._inputs)(*(place[:count] for place in made))
        cis, out_THV = cis[:count], self._out_THV[:count]
        return lambda index: self._model.attention(index, inputs, cis, batch, self._caches, out_THV)

    def results(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(final norm's output [T, D], features [T, F] or None) of the first rows, until the next step is launched."""
        features_TF = self._features_TF
        return self._x_TD[:num_rows], None if features_TF is None else features_TF[:num_rows]


def run_pieces(
    step: ChunkStep, num_rows: int, run: Callable[[Callable[[], Any]], Any] = lambda piece: piece()
) -> torch.Tensor:
    """All pieces in order, each given to `run`, without attention between them; returns the angles.

    Residuals live until the piece that takes them is done, those of feature layers to the end: memory of one that is
    gone is a later piece's, in every replay as in the capture."""
    batch = step.batch(num_rows)
    cis, residual_tD = run(functools.partial(step.first, batch))
    entering: dict[int, torch.Tensor] = {}
    for index in range(step.num_layers):
        if step.enters_feature_layer(index):
            entering[index] = residual_tD
        residual_tD = run(functools.partial(step.after, index, cis, residual_tD, dict(entering), batch))
    return cis
