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
from engine.loading.weights import TensorSpec


class _VocabularyShard(nn.Module):
    """Rows [start, start + v) of a [V, D] matrix; the last rank's may be padded with zero rows. weight: that of another
    shard of the same matrix, which this one shares."""

    def __init__(
        self,
        vocab_size: int,
        width: int,
        parallel: ParallelState,
        dtype: torch.dtype,
        kernels: Kernels,
        weight: torch.nn.Parameter | None = None,
    ):
        super().__init__()
        self.vocab_size, self.parallel, self.kernels = vocab_size, parallel, kernels
        self.num_rows = -(-vocab_size // parallel.tp)
        self.start = min(parallel.rank * self.num_rows, vocab_size)
        self.stop = min(self.start + self.num_rows, vocab_size)
        if weight is None:
            weight = empty(self.num_rows, width, dtype=dtype, device=parallel.device)
        self.weight = weight

    def specs(self, name: str) -> dict[str, TensorSpec]:
        target = self.weight[: self.stop - self.start]
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{name}.weight": spec(shape, (slice(self.start, self.stop), WHOLE), target)}


class Embedding(_VocabularyShard):
    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """[T, D]; ranks without a token's row contribute exact zeros, so the sum has the same bits everywhere."""
        x_TD = self.partial(token_ids_T)
        if self.parallel.tp == 1:
            return x_TD
        x_TD, sent = all_reduce(x_TD, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        return x_TD

    def partial(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """The same before the sum over ranks."""
        if self.parallel.is_share:
            token_ids_T = token_ids_T % self.num_rows  # others' rows are not here: its own stand in for them
        return self.kernels.embed(token_ids_T, self.weight, self.start)


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

    def argmax(self, x_SD: torch.Tensor) -> torch.Tensor:
        """The id of the largest logit, of several the lowest, int64 [S], the same on every rank; of a share's own rows.

        Ranks exchange one pair (logit, id) a row."""
        logits_Sv = self.kernels.linear(x_SD, self.weight, torch.float32)
        if self.stop - self.start < self.num_rows:
            logits_Sv[:, self.stop - self.start :] = float("-inf")
        best_S, ids_S = self.kernels.argmax(logits_Sv)
        if self.parallel.tp == 1:
            return ids_S
        pairs_S2 = torch.stack((best_S.view(torch.int32), (ids_S + self.start).int()), dim=1)
        stack_PS2, sent = all_gather(pairs_S2, self.parallel)
        self.parallel.meter.count(meter.OTHER, sent)
        winner_1S = stack_PS2[..., 0].contiguous().view(torch.float32).argmax(dim=0, keepdim=True)
        return stack_PS2[..., 1].gather(0, winner_1S)[0].long()
