"""The reduced vocabulary of a draft's head: target id = draft id + d2t[draft id]."""

from __future__ import annotations

import torch

from engine.layers.parameter import WHOLE
from engine.loading.weights import TensorSpec


class VocabularyMap:
    """offsets: int64 [draft_vocab_size], the checkpoint's d2t. Its t2d, which marks the target ids that the head has,
    only has to agree. Until a checkpoint is loaded the head's ids lie evenly among the target's."""

    def __init__(self, draft_vocab_size: int, vocab_size: int, device: torch.device):
        self.draft_vocab_size, self.vocab_size = draft_vocab_size, vocab_size
        ids = torch.arange(draft_vocab_size, dtype=torch.int64, device=device)
        self.offsets = ids * vocab_size // draft_vocab_size - ids
        self._marks: torch.Tensor | None = None
        self._is_loaded = False

    @property
    def is_identity(self) -> bool:
        return self.draft_vocab_size == self.vocab_size

    def __call__(self, draft_ids_N: torch.Tensor) -> torch.Tensor:
        return draft_ids_N if self.is_identity else draft_ids_N + self.offsets[draft_ids_N]

    def specs(self, names: set[str]) -> dict[str, TensorSpec]:
        """Those of the two tensors that the file, which has `names`, should have: d2t of a reduced vocabulary, and what
        else of the two is there."""
        specs = {}
        if "d2t" in names or not self.is_identity:
            specs["d2t"] = TensorSpec(
                (self.draft_vocab_size,), ("I64", "I32"), (WHOLE,), self._store_offsets, on_host=True
            )
        if "t2d" in names:
            specs["t2d"] = TensorSpec((self.vocab_size,), ("BOOL", "U8"), (WHOLE,), self._store_marks, on_host=True)
        return specs

    def _store_offsets(self, value: torch.Tensor) -> None:
        offsets = value.long()
        ids = torch.arange(self.draft_vocab_size) + offsets
        if not self.is_identity and not offsets.any():
            raise ValueError("is all zero, but the draft's vocabulary is reduced; export the draft again.")
        if not self.is_identity and torch.equal(offsets, torch.arange(self.draft_vocab_size)):
            raise ValueError("counts 0, 1, 2, ..., which some exports write for no table; export the draft again.")
        if ids[0] < 0 or ids[-1] >= self.vocab_size or not (ids[1:] > ids[:-1]).all():
            raise ValueError(
                f"does not lead to growing ids below {self.vocab_size}; it must hold target id minus draft id."
            )
        self.offsets.copy_(offsets)
        self._is_loaded = True
        self._compare()

    def _store_marks(self, value: torch.Tensor) -> None:
        self._marks = value.bool().clone()  # what was read is soon overwritten
        self._is_loaded |= self.is_identity
        self._compare()

    def _compare(self) -> None:
        """Once both are read, in whatever order."""
        if self._marks is None or not self._is_loaded:
            return
        ids = torch.arange(self.draft_vocab_size) + (0 if self.is_identity else self.offsets.cpu())
        if int(self._marks.sum()) != self.draft_vocab_size or not self._marks[ids].all():
            raise ValueError("disagrees: t2d does not mark the ids that d2t leads to; export the draft again.")
        self._marks = None
