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
from tests.mla_layer import batch_with

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
    """`settings` replace arguments of the loader: kernels, backend, dtype, layer_id_offset, dummy_seed, target."""
    parallel, kernels = parallel or ParallelState(), settings.pop("kernels", None) or ReferenceKernels()
    target = settings.pop("target", TargetShape(HIDDEN, VOCABULARY, LAYERS))
    dtype, backend = settings.pop("dtype", torch.float32), settings.pop("backend", None) or ReferenceAttention()
    size = (target.vocab_size, target.hidden_size)
    shards = [kind(*size, parallel, dtype, kernels) for kind in (Embedding, LMHead)]
    if parallel.device.type != "meta":
        for shard, weight in zip(shards, target_weights(target.hidden_size, target.vocab_size), strict=True):
            shard.weight[: shard.stop - shard.start] = weight[shard.start : shard.stop]
    entry = draft.find(json.loads((directory / "config.json").read_text()))
    return entry.load(
        directory,
        target,
        parallel,
        dtype,
        kernels=kernels,
        backend=backend,
        embed=shards[0],
        lm_head=shards[1],
        **settings,
    )


@dataclass
class Texts:
    """Features and next ids of all requests, long enough for a second round."""

    features: list[torch.Tensor]
    next_ids: list[torch.Tensor]


def texts(hidden: int = HIDDEN, seed: int = 3) -> Texts:
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(n + 4, 3 * hidden, generator=generator) * 2 for n in LENGTHS]
    return Texts(features, [torch.randint(VOCABULARY, (n + 4,), generator=generator) for n in LENGTHS])


class Run:
    """One drafter over one cache, poisoned where nothing is written. page: tokens a block."""

    def __init__(
        self, drafter: Drafter, parallel: ParallelState | None = None, dispatcher: str = "reference", page: int = 4
    ):
        self.drafter, self.page = drafter, page
        parallel, dtype, self.device = (
            parallel or ParallelState(),
            drafter.embed.weight.dtype,
            drafter.embed.weight.device,
        )
        shape = (NUM_BLOCKS, page, drafter.cache_width)
        self.cache = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        limits = DispatchLimits(8, drafter.embed.weight.shape[1], 2, 64, dtype)
        self.dispatcher = build(dispatcher, parallel, limits)

    def batch(self, chunks: list[tuple[int, int, int]]) -> ForwardBatch:
        """chunks: (request, first position, the one after the last)."""
        table = torch.tensor([TABLE[n] for n, _, _ in chunks], device=self.device)
        batch = batch_with(table, [stop - start for _, start, stop in chunks], [stop for _, _, stop in chunks])
        places = [(TABLE[n][p // self.page], p) for n, start, stop in chunks for p in range(start, stop)]
        batch.positions_T = torch.tensor([p for _, p in places], device=self.device)
        batch.slots_T = torch.tensor([b * self.page + p % self.page for b, p in places], device=self.device)
        batch.dispatcher = self.dispatcher
        return batch

    def last_rows(self, lengths: tuple[int, ...], ahead: int = 0) -> ForwardBatch:
        """One row a request: the last of its `lengths`, or one of those after."""
        return self.batch([(n, length + ahead - 1, length + ahead) for n, length in enumerate(lengths)])

    def inputs(self, texts: Texts, chunks: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and next ids of the chunks' rows."""
        features = torch.cat([texts.features[n][start:stop] for n, start, stop in chunks])
        ids = torch.cat([texts.next_ids[n][start:stop] for n, start, stop in chunks])
        return features.to(self.device, self.cache.dtype), ids.to(self.device)

    def extend(self, texts: Texts, chunks: list[tuple[int, int, int]]) -> DraftRows:
        return self.drafter.extend(*self.inputs(texts, chunks), self.batch(chunks), self.cache)

    def prefill(self, texts: Texts, size: int) -> DraftRows:
        """All of LENGTHS in chunks of at most `size` rows a request; the last row of each request."""
        rows: list[DraftRows | None] = [None] * len(LENGTHS)
        for first in range(0, max(LENGTHS), size):
            chunks = [(n, first, min(first + size, length)) for n, length in enumerate(LENGTHS) if first < length]
            out, end = self.extend(texts, chunks), 0
            for n, start, stop in chunks:
                end += stop - start
                rows[n] = out.select(torch.tensor([end - 1], device=self.device))
        return DraftRows(torch.cat([r.x for r in rows]), torch.cat([r.residual_TD for r in rows]))

    def propose(self, rows: DraftRows, lengths: tuple[int, ...], count: int) -> torch.Tensor:
        batches = iter([self.last_rows(lengths, ahead) for ahead in range(count)])
        return propose(self.drafter, rows, next(batches), self.cache, count, lambda batch: next(batches))
