"""The noise: Philox's published vectors, bounds at extreme bits, and draws that follow the softmax."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.kernels import random
from engine.kernels.random import gumbel, philox, uniform

NUM_DRAWS = 200_000
LOGITS = torch.tensor([1.5, 0.2, -0.7, 0.0, 2.1, -2.5, 0.9, -1.2])


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([v], dtype=torch.int64) for v in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert tuple(int(w) for w in philox(words(*counter), words(*key))) == expected


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The same in Python's own integers, which cannot overflow."""
    c, k, mask = list(counter), list(key), 2**32 - 1
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


@pytest.mark.parametrize("seed", [0, 1, -1, 7, 2**31, 2**32, 2**63 - 1, -(2**63), -12345678901234])
@pytest.mark.parametrize("position", [0, 1, 4095, 262143])
def test_every_token_has_its_own_word_of_the_block_function(seed, position):
    row = uniform(torch.tensor([seed]), torch.tensor([position]), 10)[0].double()
    unsigned = seed % 2**64
    for token in range(10):
        word = plain_philox([token // 4, position, 0, 0], [unsigned % 2**32, unsigned >> 32])[token % 4]
        assert float(row[token]) == ((word >> 9) + 0.5) * 2.0**-23


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_extreme_bits_stay_strictly_inside(monkeypatch, bits):
    monkeypatch.setattr(random, "philox", lambda counter, key: [torch.full((1, 2), bits, dtype=torch.int64)] * 4)
    row = uniform(torch.tensor([3]), torch.tensor([0]), 8)
    assert bool(((row > 0) & (row < 1)).all())
    assert bool(gumbel(torch.tensor([3]), torch.tensor([0]), 8).isfinite().all())


def test_a_row_depends_on_its_seed_and_position_alone():
    seeds, positions = torch.tensor([5, 2**40, -3, 5]), torch.tensor([9, 2, 2, 10])
    together = gumbel(seeds, positions, 101)
    for s in range(4):
        assert torch.equal(gumbel(seeds[s : s + 1], positions[s : s + 1], 101)[0], together[s])
        assert torch.equal(gumbel(seeds[s : s + 1], positions[s : s + 1], 7)[0], together[s, :7])
    assert len({tuple(row.tolist()) for row in together}) == 4


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts.double() - expected) ** 2 / expected).sum())


@functools.cache
def noise(by: str) -> torch.Tensor:
    index, fixed = torch.arange(NUM_DRAWS), torch.full((NUM_DRAWS,), 11)
    return gumbel(index, fixed, 8) if by == "seed" else gumbel(fixed, index, 8)


def draws(scale: float = 1.0, by: str = "seed") -> torch.Tensor:
    return (LOGITS + scale * noise(by)).argmax(-1)


CRITICAL_7 = 40.5  # chi-square, 7 degrees of freedom, p = 1e-6
CRITICAL_49 = 117.0  # 49 degrees of freedom, p below 1e-6


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_the_softmax(by):
    expected = LOGITS.double().softmax(-1) * NUM_DRAWS
    assert chi_square(draws(by=by).bincount(minlength=8), expected) < CRITICAL_7


def test_noise_that_is_3_percent_too_wide_would_be_noticed():
    expected = LOGITS.double().softmax(-1) * NUM_DRAWS
    assert chi_square(draws(scale=1.03).bincount(minlength=8), expected) > CRITICAL_7


@pytest.mark.parametrize("by", ["seed", "position"])
def test_neighbouring_draws_are_independent(by):
    drawn = draws(by=by)
    pairs = (drawn[0::2] * 8 + drawn[1::2]).bincount(minlength=64)
    probs = LOGITS.double().softmax(-1)
    expected = (probs.unsqueeze(1) * probs).flatten() * (NUM_DRAWS // 2)
    assert chi_square(pairs, expected) < CRITICAL_49 + 14
