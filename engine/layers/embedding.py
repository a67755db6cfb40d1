"""Token embedding and LM head, both split over the vocabulary.

Shape letters: T tokens, S sampled rows, D model width, V vocabulary, v this rank's part of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.comm import meter
from engine.comm.collectives import all_gather, all_reduce
from engine.comm.parallel_state import ParallelState
from engine.kernels.table import Kernels
from engine.layers.parameter import WHOLE, empty, spec
from engine.weights import TensorSpec


class _VocabularyShard(nn.Module):
    """Rows [start, start + v) of a [V, D] matrix; the last rank's may be padded with zero rows."""

    def __init__(self, vocab_size: int, width: int, parallel: ParallelState, dtype: torch.dtype, kernels: Kernels):
        super().__init__()
        self.vocab_size, self.parallel, self.kernels = vocab_size, parallel, kernels
        self.num_rows = -(-vocab_size // parallel.tp)
        self.start = min(parallel.rank * self.num_rows, vocab_size)
        self.stop = min(self.start + self.num_rows, vocab_size)
        self.weight = empty(self.num_rows, width, dtype=dtype, device=parallel.device)

    def specs(self, name: str) -> dict[str, TensorSpec]:
        target = self.weight[: self.stop - self.start]
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{name}.weight": spec(shape, (slice(self.start, self.stop), WHOLE), target)}


class Embedding(_VocabularyShard):
    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, D]; ranks without a token's row contribute exact zeros, so the sum has the same bits everywhere."""
        if self.parallel.is_share:
            token_ids_T = token_ids_T % self.num_rows  # others' rows are not here: its own stand in for them
        x_TD = self.kernels.embed(token_ids_T, self.weight, self.start)
        if self.parallel.tp == 1:
            return x_TD
        x_TD, sent = all_reduce(x_TD, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        return x_TD


class LMHead(_VocabularyShard):
    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Float32 logits [S, V], whole on every rank; a share, which knows its own rows alone, rules out the others."""
        logits_Sv = self.kernels.linear(x_SD, self.weight, torch.float32)
        if self.parallel.tp == 1:
            return logits_Sv
        stack_PSv, sent = all_gather(logits_Sv, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        logits_SV = stack_PSv.transpose(0, 1).flatten(1)[:, : self.vocab_size]
        if self.parallel.is_share:
            return F.pad(logits_SV, (0, self.vocab_size - logits_SV.shape[1]), value=float("-inf"))
        return logits_SV
