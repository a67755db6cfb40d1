"""The head's argmax over ranks that each hold a part of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from engine.comm.parallel_state import ParallelState
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.embedding import LMHead
from tests.gloo_ranks import on_ranks

WIDTH, ROWS = 8, 12


def logits_of(vocabulary: int) -> torch.Tensor:
    """Whole numbers, so that the largest is there several times; all below zero in the last row."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randint(-9, 4, (ROWS, vocabulary), generator=generator).float()
    logits[-1] = -1.0 - torch.arange(vocabulary) % 3
    return logits


def best(parallel: ParallelState, vocabulary: int) -> torch.Tensor:
    """A head whose product with the i-th unit row is the i-th row of logits, for WIDTH rows at a time."""
    found = []
    for logits in logits_of(vocabulary).split(WIDTH):
        head = LMHead(vocabulary, WIDTH, parallel, torch.float32, ReferenceKernels())
        head.weight[: head.stop - head.start, : len(logits)] = logits.t()[head.start : head.stop]
        found.append(head.argmax(torch.eye(WIDTH)[: len(logits)]))
    return torch.cat(found)


def both(parallel: ParallelState) -> list[torch.Tensor]:
    return [best(parallel, 50), best(parallel, 9)]


@pytest.mark.parametrize("tp", [1, 4])
def test_the_lowest_of_the_largest_wins(tmp_path, tp):
    """Also where the last rank has fewer rows than the others: zeros that fill it up are no logits; and where it has
    none, 9 rows over 4 ranks of 3."""
    expected = [logits_of(size).argmax(dim=1) for size in (50, 9)]
    for found in [both(ParallelState())] if tp == 1 else on_ranks(tp, tmp_path, both):
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == torch.int64 and torch.equal(a, b)
