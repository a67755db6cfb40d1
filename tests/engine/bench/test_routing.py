"""Routings for measurements: as many distinct experts as a rank of that kind meets, on rank 0."""

from __future__ import annotations

import pytest
import torch

from engine.bench.routing import FixedRouting, mixing_weights, routings
from engine.kernels.table import Routing

EXPERTS, TOP_K, EP = 384, 8, 8


def mean_distinct(drawn: list[torch.Tensor]) -> float:
    return sum(ids[ids < EXPERTS // EP].unique().numel() for ids in drawn) / len(drawn)


@pytest.mark.parametrize(
    ("num_tokens", "mean", "slowest"),
    [(1, 1.00, 2.56), (4, 3.88, 6.71), (8, 7.44, 11.12), (16, 13.7, 18.3), (64, 35.5, 39.8)],
)
def test_distinct_experts_follow_the_tables(num_tokens, mean, slowest):
    for kind, expected in (("mean", mean), ("slowest", slowest)):
        drawn = routings(kind, 16, num_tokens, EXPERTS, TOP_K, EP, seed=3)
        assert mean_distinct(drawn) == pytest.approx(expected, rel=0.04, abs=0.07), kind


@pytest.mark.parametrize("kind", ["mean", "slowest"])
@pytest.mark.parametrize("ep", [1, 2, 8])
def test_every_row_has_distinct_experts_and_every_call_another_routing(kind, ep):
    drawn = routings(kind, 6, 5, EXPERTS, TOP_K, ep, seed=0)
    for ids_TK in drawn:
        assert ids_TK.shape == (5, TOP_K) and ids_TK.min() >= 0 and ids_TK.max() < EXPERTS
        assert all(row.unique().numel() == TOP_K for row in ids_TK)
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    again = routings(kind, 6, 5, EXPERTS, TOP_K, ep, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    assert not torch.equal(drawn[0], routings(kind, 1, 5, EXPERTS, TOP_K, ep, seed=1)[0])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="mean, slowest"):
        routings("best", 1, 1, EXPERTS, TOP_K, EP, seed=0)


def test_the_stand_in_still_computes_the_router():
    seen = []

    class Router(torch.nn.Module):
        def forward(self, x_TD, num_tokens_1, local_experts):
            seen.append(x_TD)
            return Routing(None, None, x_TD + 1)

    ids_TK, weights_TK = torch.zeros(2, 3, dtype=torch.int64), mixing_weights(2, 3, 2.5, seed=0)
    x_TD = torch.ones(2, 4)
    ids, weights, shared, _ = FixedRouting(Router(), ids_TK, weights_TK)(x_TD, torch.tensor([2]), range(8))
    assert ids is ids_TK and weights is weights_TK and torch.equal(shared, x_TD + 1)
    assert len(seen) == 1 and seen[0] is x_TD
    assert weights_TK.min() > 0 and weights_TK.sum(-1).tolist() == pytest.approx([2.5, 2.5])
