"""Loads at the edge: ranks without a row, experts of which one rank holds all that are wanted, ids that are nowhere,
more rows than a dispatcher has room for."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.dispatch_world import NUM_MOE, PLAIN, TOP, Case, Outcome, run, run_world

RANKS = 8
MANY = 640


def cases() -> list[Case]:
    """Eight ranks with one expert each: of one row seven ranks have none, and five hold no expert that is wanted."""
    few = [Case(name, RANKS, t, "same") for name in PLAIN for t in (1, 7, 9)]
    uneven = [Case(name, RANKS, MANY, "same") for name in PLAIN if name != "reference"]
    groups = [Case(name, 2, 1, "any") for name in PLAIN]
    return few + uneven + groups


@functools.cache
def alone(num_tokens: int, routing: str) -> Outcome:
    with torch.inference_mode():
        return run(Case("reference", 1, num_tokens, routing))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[tuple[Case, list[Outcome]]]:
    return list(zip(cases(), run_world(RANKS, tmp_path_factory.mktemp("edges"), cases()), strict=True))


def test_every_rank_computes_what_one_rank_does(outcomes):
    for case, ranks in outcomes:
        expected = alone(case.num_tokens, case.routing).x
        for outcome in ranks:
            assert torch.allclose(outcome.x, expected, atol=1e-4), case
            assert torch.equal(outcome.x, ranks[0].x), case


def test_pairs_are_only_where_their_experts_are(outcomes):
    """The others compute nothing: every id they are given is -1."""
    for case, ranks in outcomes:
        if case.routing == "same":
            wanted = [case.num_tokens * NUM_MOE if rank < TOP else 0 for rank in range(RANKS)]
            assert [outcome.num_pairs for outcome in ranks] == wanted, case
        assert sum(o.num_pairs for o in ranks) == case.num_tokens * TOP * NUM_MOE * (RANKS // case.ep), case
