"""The law of what speculation samples: that of plain sampling, jointly over several tokens; planted bugs are seen.

A made-up model whose logits depend on the last token alone, a vocabulary of 5, and guesses that are right as often as
their token is drawn. The verify step and the draw are the engine's own.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine import sampling, verify
from engine.sampling import SamplingRows
from engine.verify import NO_GUESS, CommittedTokens, StepRequests

VOCABULARY, NUM_GUESSES, LENGTH, BLOCK = 5, 2, 3, 64
DRAWS, BATCH = 200_000, 20_000
TEMPERATURE, TOP_P = 0.8, 0.97
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(5))


def step_law() -> torch.Tensor:
    """[last token, next token]: softmax at the temperature, cut where the more likely tokens reach top_p."""
    law = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for last, row in enumerate((LOGITS.double() / TEMPERATURE).softmax(-1)):
        reached = 0.0
        for token in row.argsort(descending=True).tolist():
            if reached < TOP_P:
                law[last, token] = row[token]
            reached += float(row[token])
    return law / law.sum(-1, keepdim=True)


def joint_law(first: int) -> torch.Tensor:
    """Of LENGTH tokens after `first`, flat."""
    law = step_law()
    chances = []
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        chance = 1.0
        for last, token in itertools.pairwise((first, *text)):
            chance *= float(law[last, token])
        chances.append(chance)
    return torch.tensor(chances, dtype=torch.float64)


def guess(tokens_N: torch.Tensor) -> torch.Tensor:
    """[N, K]: a chain of what is second most likely, so that it is often right and often wrong."""
    second_V = LOGITS.argsort(-1, descending=True)[:, 1]
    chain = [second_V[tokens_N]]
    chain.append(second_V[chain[0]])
    return torch.stack(chain, dim=1)


def sampled_texts(seeds: range, first: int, *, same_noise: bool = False, takes_rejected: bool = False) -> torch.Tensor:
    """int64 [N, LENGTH] texts by steps that verify two guesses; the flags plant bugs."""
    count = len(seeds)
    state = CommittedTokens.empty(count, NUM_GUESSES, torch.device("cpu"))
    ones = torch.ones(count)
    rows_N = SamplingRows(
        temperature=ones * TEMPERATURE,
        top_k=torch.zeros(count, dtype=torch.int32),
        top_p=ones * TOP_P,
        log_min_p=ones * float("-inf"),
        seeds=torch.tensor(seeds),
        places=torch.zeros(count, dtype=torch.int64),
    )
    texts = torch.full((count, LENGTH + NUM_GUESSES + 1), -1)
    lengths = torch.zeros(count, dtype=torch.int64)
    last_N = torch.full((count,), first)
    while int(lengths.min()) < LENGTH:
        requests = StepRequests(
            last_N,
            lengths.clone(),
            guess(last_N),
            torch.full((count,), -1, dtype=torch.int32),
            torch.full((count,), BLOCK),
            torch.ones(count, 1, dtype=torch.int64),
        )
        rows = verify.verify_rows(requests, state, rows_N, NUM_GUESSES + 1, BLOCK)
        sampling_M = rows.sampling
        if same_noise:
            sampling_M = replace(sampling_M, places=rows.starts_N.repeat_interleave(NUM_GUESSES + 1))
        logits_MV = LOGITS[rows.token_ids_M]
        tokens_M = torch.empty(count * (NUM_GUESSES + 1), dtype=torch.int64)
        sampling.draw(logits_MV, sampling.greedy(logits_MV, tokens_M), sampling_M, tokens_M)
        verify.accept(tokens_M, rows, state)
        accepted_N = state.accepted_S.long()
        if takes_rejected:
            accepted_N = (accepted_N + 1).clamp(max=NUM_GUESSES)
        for index in range(NUM_GUESSES + 1):
            taken = (index <= accepted_N) & (lengths + index < texts.shape[1])
            places = (lengths + index)[taken]
            texts[taken, places] = state.tokens_SW[taken, index]
        lengths = (lengths + accepted_N + 1).clamp(max=texts.shape[1] - NUM_GUESSES - 1)
        last_N = texts.gather(1, (lengths - 1)[:, None])[:, 0]
    return texts[:, :LENGTH]


def chi_square(texts: torch.Tensor, first: int) -> tuple[float, int]:
    """(statistic, cells - 1) against the joint law; texts that it rules out count as infinitely far."""
    powers = torch.tensor([VOCABULARY**i for i in reversed(range(LENGTH))])
    counts = torch.bincount((texts * powers).sum(-1), minlength=VOCABULARY**LENGTH).double()
    expected = joint_law(first) * len(texts)
    if bool(counts[expected == 0].any()):
        return float("inf"), 0
    cells = expected > 0
    return float(((counts - expected)[cells] ** 2 / expected[cells]).sum()), int(cells.sum()) - 1


def statistic(draws: int, **bugs: bool) -> tuple[float, int]:
    texts = [sampled_texts(range(start, start + BATCH), 0, **bugs) for start in range(0, draws, BATCH)]
    return chi_square(torch.cat(texts), 0)


def test_the_joint_law_of_three_tokens_is_that_of_plain_sampling():
    """Mean and spread of a chi-square of n degrees are n and sqrt(2 n)."""
    found, degrees = statistic(DRAWS)
    assert degrees > 40
    assert abs(found - degrees) < 4 * (2 * degrees) ** 0.5, (found, degrees)


@pytest.mark.parametrize("bug", ["same_noise", "takes_rejected"])
def test_a_planted_bug_is_seen(bug):
    found, degrees = statistic(2 * BATCH, **{bug: True})
    assert found > degrees + 20 * (2 * degrees) ** 0.5


def test_the_same_seeds_give_the_texts_of_plain_sampling():
    texts = sampled_texts(range(500), 0)
    rows = SamplingRows(
        *(torch.full((500,), v) for v in (TEMPERATURE,)),
        top_k=torch.zeros(500, dtype=torch.int32),
        top_p=torch.full((500,), TOP_P),
        log_min_p=torch.full((500,), float("-inf")),
        seeds=torch.arange(500),
        places=torch.zeros(500, dtype=torch.int64),
    )
    last_N = torch.zeros(500, dtype=torch.int64)
    for place in range(LENGTH):
        tokens_N = torch.empty(500, dtype=torch.int64)
        logits_NV = LOGITS[last_N]
        step = replace(rows, places=torch.full((500,), place + 1))
        sampling.draw(logits_NV, sampling.greedy(logits_NV, tokens_N), step, tokens_N)
        assert torch.equal(texts[:, place], tokens_N)
        last_N = tokens_N


def test_guesses_are_often_right_and_often_wrong():
    """Else none of the above says much."""
    right = step_law()[torch.arange(VOCABULARY), LOGITS.argsort(-1, descending=True)[:, 1]]
    assert float(right.min()) > 0.1 and float(right.max()) < 0.5
    assert NO_GUESS not in guess(torch.arange(VOCABULARY))
