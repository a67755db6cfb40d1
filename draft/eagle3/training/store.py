"""The target's states of a text, computed once and kept on the device, and batches of whole sequences from it.

Shape letters: T tokens in all, B sequences, S positions, F features, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draft.eagle3.training.target import Target
from draft.eagle3.training.text import Text

PAD_STEP = 16


@dataclass
class Batch:
    """ids int64 [B, S], features [B, S, F], hidden [B, S, D] (the target's final normed states), written bool [B, S]:
    the target's own tokens; valid bool [B, S]: no padding. rows: their places in the text."""

    ids: Tensor
    features: Tensor
    hidden: Tensor
    written: Tensor
    valid: Tensor
    rows: np.ndarray


class FeatureStore:
    """All of a text on the target's device: 2 (F + D) bytes a token in BF16."""

    def __init__(self, target: Target, text: Text, layers: Sequence[int], batch_tokens: int = 2**16):
        device, self.text = target.device, text
        self.ids = torch.from_numpy(text.tokens.astype(np.int64)).to(device)
        self.written = torch.from_numpy(text.written()).to(device)
        self.starts = torch.from_numpy(text.starts).to(device)
        total = len(text.tokens)
        self.features = torch.empty(total, len(layers) * target.width, dtype=target.dtype, device=device)
        self.hidden = torch.empty(total, target.width, dtype=target.dtype, device=device)
        lengths = text.lengths()
        for rows in batches_of_rows(lengths, np.argsort(lengths, kind="stable"), batch_tokens):
            index, valid = self._places(rows)
            features, hidden = target.features(self.ids[index], layers)
            self.features[index[valid]], self.hidden[index[valid]] = features[valid], hidden[valid]

    def _places(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(where each position of the padded rows lies in the text, whether it is of that row), both [B, S]."""
        begin = self.starts[torch.from_numpy(rows).to(self.starts.device)].unsqueeze(1)
        lengths = self.text.lengths()[rows]
        width = -(-int(lengths.max()) // PAD_STEP) * PAD_STEP
        offsets = torch.arange(width, device=begin.device)
        valid = offsets < torch.from_numpy(lengths).to(begin.device).unsqueeze(1)
        return (begin + offsets).clamp_max(len(self.ids) - 1), valid

    def batch(self, rows: np.ndarray) -> Batch:
        index, valid = self._places(rows)
        written = self.written[index] & valid
        return Batch(self.ids[index] * valid, self.features[index], self.hidden[index], written, valid, rows)

    def stream(self, batch_tokens: int, seed: int) -> Iterator[Batch]:
        """Endless epochs in random order, rows of like length together."""
        rng, lengths = np.random.default_rng(seed), self.text.lengths()
        while True:
            jittered = lengths * rng.uniform(0.9, 1.1, len(lengths))
            groups = batches_of_rows(lengths, np.argsort(jittered, kind="stable"), batch_tokens)
            for i in rng.permutation(len(groups)):
                yield self.batch(groups[i])


def batches_of_rows(lengths: np.ndarray, order: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Cuts `order` so that each part, padded to its longest, has at most `batch_tokens` (or is one row)."""
    parts, begin, longest = [], 0, 0
    for end, row in enumerate(order):
        grown = max(longest, int(lengths[row]) + PAD_STEP)
        if end > begin and grown * (end - begin + 1) > batch_tokens:
            parts.append(order[begin:end])
            begin, grown = end, int(lengths[row]) + PAD_STEP
        longest = grown
    return [*parts, order[begin:]] if len(order) else []
