"""The draft as inference runs it, position by position with a cache: the twin that `DraftModel.unroll` must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draft.eagle3.training.model import DraftModel


class Chain:
    """One sequence's cache. Every entry is the position that wrote it: real features first, own states behind."""

    def __init__(self, model: DraftModel):
        self.model = model
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def extend(self, features: Tensor, next_ids: Tensor) -> Tensor:
        """Writes the entries of the next positions, features [n, F] with the tokens that follow; returns the last
        position's logits [V]."""
        for row, token in zip(self.model.fc(features), next_ids, strict=True):
            stream = self._write(row, token)
        self._stream = stream
        return self.model.logits(stream)

    def follow(self, token: Tensor) -> Tensor:
        """Goes on from the draft's own state with the guessed (or given) token; logits [V]."""
        self._stream = self._write(self._stream, token)
        return self.model.logits(self._stream)

    def _write(self, residual: Tensor, token: Tensor) -> Tensor:
        layer = self.model.midlayer
        x = layer.inputs(F.embedding(token, self.model.embedding), residual)
        position = torch.tensor([len(self.keys)], device=x.device)
        q, k, v = (part[0, :, 0] for part in layer.self_attn.project(x[None, None], position))
        self.keys.append(k)
        self.values.append(v)
        keys, values = torch.stack(self.keys, 1), torch.stack(self.values, 1)
        weights = (keys @ q.unsqueeze(-1) * q.shape[-1] ** -0.5).float().softmax(1).to(v.dtype)
        mixed = (weights * values).sum(1)
        return layer.finish(residual[None, None], mixed[None, :, None])[0, 0]


@torch.no_grad()
def chain_logits(model: DraftModel, features: Tensor, ids: Tensor, position: int, steps: int) -> Tensor:
    """Logits [steps, V] of a chain that starts behind `position`, fed with the sequence's own tokens.

    features [S, F], ids [S]; position + steps must be below S."""
    chain = Chain(model)
    rows = [chain.extend(features[: position + 1], ids[1 : position + 2])]
    rows += [chain.follow(ids[position + 1 + step]) for step in range(1, steps)]
    return torch.stack(rows)


@torch.no_grad()
def unrolled_logits(model: DraftModel, features: Tensor, ids: Tensor, position: int, steps: int) -> Tensor:
    """The same numbers from the training graph."""
    streams = model.unroll(features[None], ids[None], steps)
    return torch.stack([model.logits(stream[0, position]) for stream in streams])


def largest_difference(model: DraftModel, features: Tensor, ids: Tensor, starts: list[int], steps: int) -> float:
    """Between both forms, over chains behind each of `starts`; in logits."""
    pairs = [(form(model, features, ids, start, steps) for form in (chain_logits, unrolled_logits)) for start in starts]
    return max(float((a - b).abs().max()) for a, b in pairs)
