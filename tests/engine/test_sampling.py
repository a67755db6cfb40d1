"""Each sampling parameter against a slow oracle in plain Python, and rows that do not know their neighbours."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from engine.kernels.random import gumbel
from engine.request import Request
from engine.sampling import LogitShaper, SamplingRows, draw, forbid, gather_logprobs, greedy
from engine.sampling_params import SamplingParams

VOCAB = 50
CPU = torch.device("cpu")
EOS = 49


def make(params: SamplingParams, prompt=(1, 2, 3), output=(), seed=0, stop_ids=(EOS,)) -> Request:
    return Request("r", list(prompt), params, seed, 99, frozenset(stop_ids), list(output))


def sample(logits_SV: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """One token a row, as a step of the engine chooses it."""
    logits_SV, shape = logits_SV.clone(), LogitShaper(CPU)
    for row, request in enumerate(requests):
        shape(logits_SV[row : row + 1], request)
    tokens_S = torch.full((len(requests),), -1)
    places = np.array([r.num_tokens for r in requests])
    draw(logits_SV, greedy(logits_SV, tokens_S), SamplingRows.of(requests, places, CPU), tokens_S)
    return tokens_S


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def oracle_shape(row: list[float], request: Request) -> list[float]:
    """Forbidden ends, bias, repetition penalty (prompt and output), frequency and presence penalty (output)."""
    params, row = request.params, list(row)
    if len(request.output_token_ids) < params.min_tokens:
        for token in request.stop_token_ids:
            row[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for token in set(request.prompt_token_ids + request.output_token_ids):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(request.output_token_ids):
        row[token] -= params.frequency_penalty * request.output_token_ids.count(token) + params.presence_penalty
    return row


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(v - top) for v in row]
    return [w / sum(weights) for w in weights]


def oracle_filter(row: list[float], params: SamplingParams) -> list[float]:
    """min_p over the whole distribution, then the k best, then the fewest of them that reach p."""
    row = [v / params.temperature for v in row]
    probs = softmax(row)
    row = [v if p >= params.min_p * max(probs) else -math.inf for v, p in zip(row, probs, strict=True)]
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    kept = order[: params.top_k] if params.top_k else order
    row = [v if t in kept else -math.inf for t, v in enumerate(row)]
    probs, before, allowed = softmax(row), 0.0, set()
    for token in order:
        if not allowed or before < params.top_p:
            allowed.add(token)
        before += probs[token]
    return [v if t in allowed else -math.inf for t, v in enumerate(row)]


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    return SamplingParams(
        temperature=maybe(rng.choice([0.0, 0.3, 0.7, 1.5]), 1.0),
        top_k=maybe(rng.choice([1, 2, 7, 50, 1000]), 0),
        top_p=maybe(rng.choice([0.05, 0.5, 0.9]), 1.0),
        min_p=maybe(rng.choice([0.02, 0.3]), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.choice([0.5, 1.3, 2.0]), 1.0),
        logit_bias=maybe({rng.randrange(VOCAB): rng.uniform(-8, 8) for _ in range(3)}, None),
        min_tokens=maybe(rng.randrange(6), 0),
        max_tokens=99,
    )


def random_request(rng: random.Random) -> Request:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))]
    return make(random_params(rng), prompt, output, rng.getrandbits(64) - 2**63, (EOS, rng.randrange(VOCAB)))


@pytest.mark.parametrize("case", range(40))
def test_any_parameters_against_the_oracle(case):
    """The choice is the best of the oracle's scores plus the noise of the request's seed and place."""
    rng = random.Random(case)
    requests = [random_request(rng) for _ in range(6)]
    logits = random_logits(6, case)
    chosen = sample(logits, requests)
    for row, request, token in zip(logits.tolist(), requests, chosen.tolist(), strict=True):
        scores = oracle_shape(row, request)
        if not request.params.greedy:
            noise = gumbel(torch.tensor([request.seed]), torch.tensor([request.num_tokens]), VOCAB)[0].tolist()
            scores = [v + g for v, g in zip(oracle_filter(scores, request.params), noise, strict=True)]
        assert scores[token] > max(scores) - 1e-4, (request.params, token)


@pytest.mark.parametrize("case", range(10))
def test_a_row_is_bitwise_independent_of_its_neighbours(case):
    """Same seed, same token: alone, in any batch, in any order."""
    rng = random.Random(1000 + case)
    requests, logits = [random_request(rng) for _ in range(12)], random_logits(12, case)
    together = sample(logits, requests).tolist()
    order = rng.sample(range(12), 12)
    assert sample(logits[order], [requests[i] for i in order]).tolist() == [together[i] for i in order]
    assert [int(sample(logits[i : i + 1], [requests[i]])) for i in range(12)] == together


@pytest.mark.parametrize("case", range(20))
def test_rows_of_guesses_are_shaped_as_if_the_guesses_before_were_output(case):
    """Row j of a verify step is what plain decoding would see after j of the guesses; rows beyond are like the last."""
    rng = random.Random(2000 + case)
    request = random_request(rng)
    request.guess_ids = [rng.randrange(VOCAB) for _ in range(4)]
    num_guesses = rng.randrange(5)
    logits = random_logits(6, case)
    shaped = logits.clone()
    LogitShaper(CPU)(shaped, request, num_guesses)
    for row in range(6):
        output = request.output_token_ids + request.guess_ids[: min(row, num_guesses)]
        alone = make(request.params, request.prompt_token_ids, output, 0, request.stop_token_ids)
        assert shaped[row].tolist() == pytest.approx(oracle_shape(logits[row].tolist(), alone), abs=1e-4)


def draws_of(params: SamplingParams, logits: torch.Tensor, count: int = 400, **kwargs) -> list[int]:
    requests = [make(params, seed=seed, **kwargs) for seed in range(count)]
    return sample(logits.expand(count, -1), requests).tolist()


PROBS = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03]).log()


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.6}, {0, 1}),
        ({"min_p": 0.1}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.75}, {0, 1}),  # of the three best, 0.444 + 0.333 reach 0.75
        ({"min_p": 0.6, "top_p": 0.56}, {0}),  # min_p first: of two, the first has 0.571
        ({"min_p": 0.45, "top_p": 0.75}, {0, 1}),
        ({"temperature": 1e-3}, {0}),
        ({"temperature": 1e-30}, {0}),
        ({"temperature": 1e-45}, {0}),
    ],
)
def test_the_tokens_that_can_come(params, support):
    assert set(draws_of(SamplingParams(**params), PROBS, stop_ids=())) == support


@pytest.mark.parametrize("offset", [0.0, 500.0, -500.0])
def test_tiny_temperatures_of_large_logits_give_the_most_likely(offset):
    """1e-37 would turn several logits into infinity, and the first of them would win."""
    logits = torch.tensor([10.0, 12.0, 11.0]) + offset
    assert set(draws_of(SamplingParams(temperature=1e-37), logits, stop_ids=())) == {1}


def test_min_tokens_masks_every_end_until_then():
    logits = torch.zeros(6)
    logits[[4, 5]] = 50.0
    params = SamplingParams(min_tokens=2, max_tokens=9)
    for num_output, expected in ((0, False), (1, False), (2, True)):
        drawn = set(draws_of(params, logits, output=[0] * num_output, stop_ids=(4, 5)))
        assert bool(drawn & {4, 5}) is expected
    params = SamplingParams(min_tokens=2, max_tokens=9, temperature=0.0)
    assert set(draws_of(params, logits, 1, stop_ids=(4, 5))) == {0}


def test_bias_bans_and_forces():
    logits = random_logits(1, 0)[0]
    best = int(logits.argmax())
    assert best not in draws_of(SamplingParams(logit_bias={best: -100}), logits)
    assert set(draws_of(SamplingParams(logit_bias={7: 100}), logits)) == {7}


def test_the_repetition_penalty_sees_the_prompt_and_the_others_do_not():
    logits = torch.tensor([[2.0, 1.9, -5.0]])

    def best(**changes) -> int:
        return int(sample(logits, [make(SamplingParams(temperature=0.0, **changes), prompt=[0, 0])]))

    assert best() == 0 and best(repetition_penalty=1.2) == 1
    assert best(presence_penalty=2.0, frequency_penalty=2.0) == 0


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, -(2**63), 2**32 + 5])
def test_every_64_bit_seed_works_and_repeats(seed):
    logits = random_logits(1, 3)
    params = SamplingParams(temperature=1.0)
    first, again = (int(sample(logits, [make(params, seed=seed)])) for _ in range(2))
    assert first == again


def test_seeds_and_places_draw_apart():
    logits = torch.zeros(1, VOCAB)
    params = SamplingParams()
    by_seed = {int(sample(logits, [make(params, seed=s)])) for s in range(100)}
    by_place = {int(sample(logits, [make(params, output=[0] * n)])) for n in range(100)}
    assert len(by_seed) > 30 and len(by_place) > 30


@pytest.mark.parametrize("num_top", [0, 1, 3, 20])
def test_logprobs_ranks_and_top(num_top):
    logits = random_logits(10, 5)
    chosen = torch.arange(10) * 5
    got = gather_logprobs(logits, chosen, num_top)
    for s in range(10):
        probs = [math.log(p) for p in softmax(logits[s].tolist())]
        order = sorted(range(VOCAB), key=lambda t: -probs[t])
        assert got.chosen[s] == pytest.approx(probs[5 * s], abs=1e-4)
        assert got.ranks[s] == order.index(5 * s) + 1
        assert got.top_ids[s] == order[:num_top]
        assert got.top_logprobs[s] == pytest.approx([probs[t] for t in order[:num_top]], abs=1e-4)


def test_ties_share_the_better_rank_and_the_top_has_no_token_twice():
    got = gather_logprobs(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), torch.tensor([3]), 5)
    assert got.ranks == [1] and sorted(got.top_ids[0]) == [0, 1, 2, 3, 4] and set(got.top_ids[0][:3]) == {1, 2, 3}
    assert got.top_logprobs[0] == sorted(got.top_logprobs[0], reverse=True)
    assert gather_logprobs(torch.tensor([[1.0, 3.0, 3.0]]), torch.tensor([0]), 0).ranks == [3]


def test_masks_reach_the_rows_they_are_of():
    logits_MV = torch.randn(70, 100)
    expected = logits_MV.clone()
    rows_R = torch.arange(0, 70, 2)
    masks_RB = torch.randint(-(2**31), 2**31, (35, 5), dtype=torch.int32)
    for row, words in zip(rows_R.tolist(), masks_RB.tolist(), strict=True):
        for token in range(100):
            if not words[token // 32] >> token % 32 & 1:
                expected[row, token] = float("-inf")
    forbid(logits_MV, rows_R, masks_RB)
    assert torch.equal(logits_MV, expected)
