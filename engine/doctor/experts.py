"""How many distinct experts a step of T rows reads on the slowest rank, under uniform routing without replacement."""

from __future__ import annotations

from functools import lru_cache

import torch

_TRIALS = 4096
_CELLS = 8 * 10**6  # random numbers of one simulation


def distinct_experts(num_experts: int, top_k: int, rows: int) -> float:
    """Expected distinct experts of `rows` rows over all experts: E (1 - (1 - K/E)^T)."""
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


@lru_cache(maxsize=256)
def slowest_group(num_experts: int, top_k: int, groups: int, rows: int, seed: int = 0) -> float:
    """Expected distinct experts of the group, of `groups` equal ones, that has most of them.

    A layer waits for that group. Simulated with a fixed seed, within about 1 %; exact for one group.
    """
    if groups == 1:
        return distinct_experts(num_experts, top_k, rows)
    generator = torch.Generator().manual_seed(seed)
    trials = max(64, min(_TRIALS, _CELLS // (rows * num_experts)))
    ids_NTK = torch.rand(trials, rows, num_experts, generator=generator).topk(top_k).indices
    hit_NE = torch.zeros(trials, num_experts, dtype=torch.bool).scatter_(1, ids_NTK.flatten(1), True)
    return hit_NE.view(trials, groups, -1).sum(2).amax(1).double().mean().item()
