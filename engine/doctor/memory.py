"""What a rank's memory holds, from the model's sizes alone.

One pure sum, so that a check before a start can use the very same figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.bench.roofline import ShareSizes
from engine.cache_plan import margin_bytes
from engine.config import EngineConfig

WORKSPACE_BYTES = 2 * 10**9
"""Activations of the largest step, the library's own buffers and the context: an allowance, not a count."""


@dataclass(frozen=True)
class MemorySum:
    """Bytes of one rank; `cache` is what is left for the KV cache, below zero where the weights do not fit."""

    total: int
    weights: float
    graphs: int
    workspace: int
    cache: float
    token_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens of context that fit, all requests together."""
        return max(int(self.cache // self.token_bytes), 0)

    def sentence(self) -> str:
        parts = (
            f"{self.weights / 1e9:.1f} GB of weights, {self.graphs / 1e9:.1f} for graphs, {self.workspace / 1e9:.1f}"
        )
        if self.cache <= 0:
            return (
                f"A rank needs {parts} for a step, more than its {self.total / 1e9:.0f} GB less "
                f"{margin_bytes(self.total) / 1e9:.1f} kept free: the model does not fit; use more ranks."
            )
        return (
            f"A rank of {self.total / 1e9:.0f} GB holds {parts} for a step and {self.cache / 1e9:.1f} GB of cache = "
            f"{self.tokens:,} tokens of context in all, {self.token_bytes / 1e3:.1f} kB each on every rank."
        )


def memory_sum(sizes: ShareSizes, total: int, graph_memory_gb: float = EngineConfig.graph_memory_gb) -> MemorySum:
    """The sum for a rank with `total` bytes of memory, of which the engine keeps `margin_bytes` free.

    Weights as the checkpoint stores them (experts INT4 where it has them so), embedding and head sharded.
    """
    graphs, weights = int(graph_memory_gb * 2**30), sizes.total_bytes()
    cache = total - margin_bytes(total) - weights - graphs - WORKSPACE_BYTES
    return MemorySum(total, weights, graphs, WORKSPACE_BYTES, cache, sizes.kv_bytes(1))
