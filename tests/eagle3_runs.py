"""Drafts of `tests.drafts` loaded and run step by step over a paged cache, by one rank or several."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import draft
from draft.base import Drafter, DraftRows, TargetShape, propose
from engine.attention.reference import ReferenceAttention
from engine.batch import ForwardBatch
from engine.comm.dispatcher import DispatchLimits, build
from engine.comm.parallel_state import ParallelState
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.embedding import Embedding, LMHead
from tests.drafts import DraftShape
from tests.mla_layer import BLOCK, batch_of

HIDDEN, VOCABULARY, LAYERS = 32, 96, 8
MLA = DraftShape("mla", HIDDEN, VOCABULARY, 48, 4, 24, 16, 8, 8, 12, has_embedding=True)
LLAMA = DraftShape("llama", HIDDEN, VOCABULARY, 48, 4, num_kv_heads=2, head_dim=16, prefix="layers.0.")
TABLE = [[5, 2, 9, 1], [3, 7, 4, 8]]
LENGTHS = (11, 6)
NUM_BLOCKS = 10


def target_weights(hidden: int = HIDDEN, vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding and head."""
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(vocabulary, hidden, generator=generator)
    return embedding, torch.randn(vocabulary, hidden, generator=generator) * 4 / hidden**0.5


def load(directory: Path, parallel: ParallelState | None = None, **settings) -> Drafter:
    """`settings` replace arguments of the loader: kernels, layer_id_offset, dummy_seed, target."""
    parallel, kernels = parallel or ParallelState(), settings.pop("kernels", None) or ReferenceKernels()
    target = settings.pop("target", TargetShape(HIDDEN, VOCABULARY, LAYERS))
    size = (target.vocab_size, target.hidden_size)
    shards = [kind(*size, parallel, torch.float32, kernels) for kind in (Embedding, LMHead)]
    if parallel.device.type != "meta":
        for shard, weight in zip(shards, target_weights(target.hidden_size, target.vocab_size), strict=True):
            shard.weight[: shard.stop - shard.start] = weight[shard.start : shard.stop]
    entry = draft.find(json.loads((directory / "config.json").read_text()))
    return entry.load(
        directory,
        target,
        parallel,
        torch.float32,
        kernels=kernels,
        backend=ReferenceAttention(),
        embed=shards[0],
        lm_head=shards[1],
        **settings,
    )


@dataclass
class Texts:
    """Features and next ids of all requests, long enough for a second round."""

    features: list[torch.Tensor]
    next_ids: list[torch.Tensor]


def texts(num_features: int = 3, seed: int = 3) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(n + 4, num_features * HIDDEN, generator=generator) * 2 for n in LENGTHS]
    return Texts(features, [torch.randint(VOCABULARY, (n + 4,), generator=generator) for n in LENGTHS])


class Run:
    """One drafter over one cache, poisoned where nothing is written."""

    def __init__(self, drafter: Drafter, parallel: ParallelState | None = None, dispatcher: str = "reference"):
        self.drafter = drafter
        self.cache = torch.full((NUM_BLOCKS, BLOCK, drafter.cache_width), float("nan"))
        limits = DispatchLimits(8, HIDDEN, 2, 64, torch.float32)
        self.dispatcher = build(dispatcher, parallel or ParallelState(), limits)

    def batch(self, chunks: list[tuple[int, int, int]]) -> ForwardBatch:
        """chunks: (request, first position, the one after the last)."""
        batch = batch_of(TABLE, chunks)
        batch.dispatcher = self.dispatcher
        return batch

    def extend(self, texts: Texts, chunks: list[tuple[int, int, int]]) -> DraftRows:
        features = torch.cat([texts.features[n][start:stop] for n, start, stop in chunks])
        ids = torch.cat([texts.next_ids[n][start:stop] for n, start, stop in chunks])
        return self.drafter.extend(features, ids, self.batch(chunks), self.cache)

    def prefill(self, texts: Texts, size: int) -> DraftRows:
        """All of LENGTHS in chunks of at most `size` rows a request; the last row of each request."""
        rows: list[DraftRows | None] = [None] * len(LENGTHS)
        for first in range(0, max(LENGTHS), size):
            chunks = [(n, first, min(first + size, length)) for n, length in enumerate(LENGTHS) if first < length]
            out, end = self.extend(texts, chunks), 0
            for n, start, stop in chunks:
                end += stop - start
                rows[n] = out.select(torch.tensor([end - 1]))
        return DraftRows(torch.cat([r.x for r in rows]), torch.cat([r.residual_TD for r in rows]))

    def propose(self, rows: DraftRows, lengths: tuple[int, ...], count: int) -> torch.Tensor:
        def at(lengths: list[int]) -> ForwardBatch:
            return self.batch([(n, length - 1, length) for n, length in enumerate(lengths)])

        def advance(batch: ForwardBatch) -> ForwardBatch:
            return at([length + 1 for length in batch.seq_lens])

        return propose(self.drafter, rows, at(list(lengths)), self.cache, count, advance)
