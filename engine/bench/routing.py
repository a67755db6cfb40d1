"""Seeded routings for measurements: uniform over all experts, as an average rank or as the slowest one meets them.

Shape letters: T tokens, K experts a token, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from engine.kernels.reference import local_ids
from engine.kernels.table import Routing

KINDS = ("mean", "slowest")
_POOL_ROWS = 32768


def routings(
    kind: str, count: int, num_tokens: int, num_experts: int, top_k: int, ep: int, seed: int
) -> list[torch.Tensor]:
    """`count` draws of int64 ids [T, K] over all experts, in which the rank to measure is rank 0 of `ep` groups.

    The draws come from a pool of uniform ones. "mean" looks at any group of a draw, "slowest" at the one with the most
    distinct experts; draws are picked so that the mean count of distinct experts follows its expectation over the
    groups looked at, which a few plain draws of few tokens would miss by far.
    """
    if kind not in KINDS:
        raise ValueError(f"routing {kind!r} is not known; use one of {', '.join(KINDS)}.")
    generator = torch.Generator().manual_seed(seed)
    size = max(count, min(512, _POOL_ROWS // num_tokens))
    pool = [torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices for _ in range(size)]
    if ep == 1:
        return pool[:count]
    share = num_experts // ep
    seen = [_distinct_by_group(ids_TK, num_experts, ep) for ids_TK in pool]
    candidates = [
        (counts[group], draw, group)
        for draw, counts in enumerate(seen)
        for group in ([counts.index(max(counts))] if kind == "slowest" else range(ep))
    ]
    target = sum(number for number, _, _ in candidates) / len(candidates)
    chosen, total = [], 0
    for index in range(count):
        wanted = target * (index + 1) - total
        best = min(candidates, key=lambda candidate: abs(candidate[0] - wanted))
        candidates.remove(best)
        total += best[0]
        chosen.append((pool[best[1]] - best[2] * share) % num_experts)
    return chosen


def _distinct_by_group(ids_TK: torch.Tensor, num_experts: int, ep: int) -> list[int]:
    hit = torch.zeros(num_experts, dtype=torch.bool)
    hit[ids_TK.flatten()] = True
    return hit.view(ep, -1).sum(1).tolist()


def mixing_weights(num_tokens: int, top_k: int, scale: float, seed: int) -> torch.Tensor:
    """Float32 [T, K], positive, each row summing to `scale`, as the router gives them."""
    weights_TK = torch.rand(num_tokens, top_k, generator=torch.Generator().manual_seed(seed)) + 0.1
    return weights_TK / weights_TK.sum(-1, keepdim=True) * scale


class FixedRouting(nn.Module):
    """Stands in for a router: computes what it computes, then answers with given local ids and weights for T rows."""

    def __init__(self, router: nn.Module, ids_TK: torch.Tensor, weights_TK: torch.Tensor):
        super().__init__()
        self.router = router
        self.ids_TK, self.weights_TK = ids_TK, weights_TK

    def forward(self, x_TD: torch.Tensor, num_tokens_1: torch.Tensor, local_experts: range) -> Routing:
        shared_TS = self.router(x_TD, num_tokens_1, local_experts).shared_TS
        return Routing(self.ids_TK, self.weights_TK, shared_TS)


@contextmanager
def fixed_routing(model: nn.Module, kind: str, num_tokens: int, ep: int, seed: int) -> Iterator[None]:
    """Within it every MoE layer of `model` routes steps of `num_tokens` rows as `routings` says, each its own way."""
    config, device = model.config, model.parallel.device
    layers, local = moe_layers(model), model.parallel.expert_range(config.n_routed_experts)
    drawn = routings(kind, len(layers), num_tokens, config.n_routed_experts, config.num_experts_per_tok, ep, seed)
    for index, (layer, ids_TK) in enumerate(zip(layers, drawn, strict=True)):
        weights_TK = mixing_weights(*ids_TK.shape, config.routed_scaling_factor, seed + index)
        ids_TK = local_ids(ids_TK, local, torch.tensor(num_tokens)).int()
        layer.router = FixedRouting(layer.router, ids_TK.to(device), weights_TK.to(device))
    try:
        yield
    finally:
        for layer in layers:
            layer.router = layer.router.router


def moe_layers(model: nn.Module) -> list[nn.Module]:
    """The feed-forward blocks with routed experts."""
    return [layer.feed_forward for layer in model.layers if hasattr(layer.feed_forward, "experts")]


@dataclass
class ExpertCounts:
    """Of the layers that ran: distinct local experts and (row, local expert) pairs of each."""

    distinct: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)


@contextmanager
def counted_experts(model: nn.Module) -> Iterator[ExpertCounts]:
    """Counts what reaches the experts of an eager step; it waits for the device in every layer."""
    counts = ExpertCounts()

    def note(_module: nn.Module, arguments: tuple) -> None:
        local = arguments[1][arguments[1] >= 0]
        counts.distinct.append(local.unique().numel())
        counts.pairs.append(local.numel())

    hooks = [layer.experts.register_forward_pre_hook(note) for layer in moe_layers(model)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()
