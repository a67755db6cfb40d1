"""The draft's reduced vocabulary: which target tokens it can guess, and the offset table that says so."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def choose_tokens(counts: np.ndarray, size: int, forced: list[int]) -> np.ndarray:
    """Ascending ids of the `size` most frequent tokens, int64; `forced` ones are always among them.

    counts: [V]. Among equals the lowest id comes first. Raises ValueError where `size` cannot hold what is asked.
    """
    if not len(set(forced)) <= size <= len(counts):
        raise ValueError(
            f"A draft vocabulary of {size} does not lie between {len(set(forced))} forced and {len(counts)} tokens."
        )
    ranks = counts.astype(np.float64)
    ranks[np.asarray(sorted(set(forced)), np.int64)] = np.inf
    return np.sort(np.argsort(-ranks, kind="stable")[:size]).astype(np.int64)


def offsets(chosen: np.ndarray) -> Tensor:
    """d2t, int64: target id minus draft id (eagle3.md section 3)."""
    return torch.from_numpy(chosen - np.arange(len(chosen)))


def coverage(counts: np.ndarray, chosen: np.ndarray) -> float:
    """The share of the counted text that the draft can guess at all."""
    return float(counts[chosen].sum() / max(counts.sum(), 1))
