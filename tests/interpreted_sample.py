"""Run as a child with TRITON_INTERPRET=1: the sampling kernels against their plain twins on small vocabularies."""

from __future__ import annotations

import random

import numpy as np
import torch

from engine import sampling
from engine.kernels.gpu import sample
from engine.request import Request
from engine.sampling_params import SamplingParams

CPU = torch.device("cpu")
EDGES = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.6}]


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 1, 3, 50, 1000]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
    )


def logits_of(case: int, rows: int, vocab: int) -> torch.Tensor:
    """Every third case is full of ties; every fifth has a row of -inf but for one token."""
    logits_SV = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(case)) * 3
    if case % 3 == 0:
        logits_SV = logits_SV.round()
    if case % 5 == 0:
        logits_SV[0] = float("-inf")
        logits_SV[0, vocab // 2] = 1.0
    return logits_SV


def check(logits_SV: torch.Tensor, params: list[SamplingParams], rng: random.Random) -> None:
    requests = [Request("r", [1] * rng.randint(1, 50), p, rng.getrandbits(64) - 2**63, 99) for p in params]
    rows = sampling.SamplingRows.of(requests, np.array([r.num_tokens for r in requests]), CPU)
    tokens_S, expected_S = torch.full((len(params),), -1), torch.full((len(params),), -2)
    maxima_S, expected_maxima_S = sample.greedy(logits_SV, tokens_S), sampling.greedy(logits_SV, expected_S)
    assert torch.equal(tokens_S, expected_S) and torch.equal(maxima_S, expected_maxima_S)
    sample.draw(logits_SV, maxima_S, rows, tokens_S)
    sampling.draw(logits_SV, maxima_S, rows, expected_S)
    assert torch.equal(tokens_S, expected_S), (tokens_S, expected_S, params)


def check_kept_set(vocab: int) -> None:
    """All tokens equal: filters keep the first ones, exactly as many as the twin, seen through many draws."""
    logits_SV = torch.zeros(6, vocab)
    for changes in EDGES:
        check(logits_SV, [SamplingParams(**changes)] * 6, random.Random(vocab))


def check_nan_row(vocab: int) -> None:
    """A row of NaN gets some token of the vocabulary, greedy or drawn; its neighbour gets its own."""
    logits_SV = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    logits_SV[0] = float("nan")
    requests = [Request("r", [1], SamplingParams(temperature=0.7), 5, 9)] * 2
    tokens_S = torch.full((2,), -1)
    maxima_S = sample.greedy(logits_SV, tokens_S)
    assert 0 <= tokens_S[0] < vocab and tokens_S[1] == logits_SV[1].argmax()
    sample.draw(logits_SV, maxima_S, sampling.SamplingRows.of(requests, np.array([1, 1]), CPU), tokens_S)
    assert ((tokens_S >= 0) & (tokens_S < vocab)).all()


def main() -> None:
    sample.PART, sample.CHUNK = 64, 256
    check_nan_row(37)
    for case in range(9):
        rng = random.Random(case)
        vocab = rng.choice([1, 5, 50, 257, 300])
        check(logits_of(case, 3, vocab), [any_params(rng) for _ in range(3)], rng)
    check_kept_set(10)
    wide = logits_of(99, 3, 400)[:, :300]
    check(wide, [SamplingParams(), SamplingParams(top_k=7), SamplingParams(temperature=0.0)], random.Random(1))
    seeds, places = torch.tensor([5, -7, -(2**63)]), torch.tensor([0, 2**33 + 5, 99])
    everything = torch.ones(3), torch.zeros(3, dtype=torch.int32), torch.ones(3), torch.full((3,), -torch.inf)
    rows = sampling.SamplingRows(*everything, seeds, places)
    tokens_S, expected_S = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    sample.draw(torch.zeros(3, 1000), torch.zeros(3), rows, tokens_S)
    sampling.draw(torch.zeros(3, 1000), torch.zeros(3), rows, expected_S)
    assert torch.equal(tokens_S, expected_S), "noise alone decides"


if __name__ == "__main__":
    main()
