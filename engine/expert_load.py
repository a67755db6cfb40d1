"""How many tokens were routed to each expert, and what that means for the ranks that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.comm.parallel_state import ParallelState
from engine.expert_map import ExpertMap


@dataclass(frozen=True)
class ExpertLoad:
    """layers[l][e]: tokens that layer first_moe_layer + l sent to logical expert e, since the start.

    num_tokens: tokens that took part. ranks[l][r]: the share of layer l's routed tokens that rank r computed, 0 to 1;
    ranks that hold slices of the same experts have equal shares. rank_imbalance_ratio: the busiest rank's share over
    the mean, averaged over layers: 1 is even; None before the first token.
    """

    layers: list[list[int]]
    first_moe_layer: int
    num_tokens: int
    rank_imbalance_ratio: float | None
    ranks: list[list[float]]

    @classmethod
    def of(
        cls, slots: Sequence[Sequence[int]], first_layer: int, top_k: int, experts: ExpertMap, parallel: ParallelState
    ) -> ExpertLoad:
        """slots: [MoE layers][physical slots], the tokens that each slot was sent."""
        ranks = [_shares(row, parallel) for row in slots]
        busy = [shares for shares, row in zip(ranks, slots, strict=True) if sum(row)]
        return cls(
            [_logical(row, experts.of_layer(layer)) for layer, row in enumerate(slots, first_layer)],
            first_layer,
            sum(slots[0]) // top_k if slots else 0,
            sum(max(shares) * parallel.tp for shares in busy) / len(busy) if busy else None,
            ranks,
        )


def _shares(slots: Sequence[int], parallel: ParallelState) -> list[float]:
    size = len(slots) // parallel.ep
    groups = [sum(slots[start : start + size]) for start in range(0, len(slots), size)]
    total = max(sum(slots), 1)
    return [groups[rank // parallel.expert_tp] / parallel.expert_tp / total for rank in range(parallel.tp)]


def _logical(slots: Sequence[int], order: tuple[int, ...] | None) -> list[int]:
    if order is None:
        return list(slots)
    counts = dict(zip(order, slots, strict=True))
    return [counts[expert] for expert in range(len(order))]
