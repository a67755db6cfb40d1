"""What every rank wants of the files is read once: each rank reads a piece, and the ranks give each other the rest.

Whole tensors that are on all ranks, and those of which each takes some columns, so that it would read all rows. They go
in batches, whose order and cuts every rank works out alike from headers and specs; between the batches each rank reads
what it alone wants. Its reader's threads go on reading ahead while ranks exchange a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine.comm.collectives import all_gather
from engine.comm.parallel_state import ParallelState
from engine.comm.peers import peer_obstacle
from engine.loading import tensor_reader
from engine.loading.extent_reader import ALIGNMENT, SPAN_BYTES, Extent, Span, plan_spans
from engine.loading.tensor_reader import Wish

BATCH_BYTES = 4 * SPAN_BYTES
_PLACE = 16  # bytes; where a tensor of any type may begin


class Gather(NamedTuple):
    """How this rank exchanges pieces. run: uint8 [n] of this rank -> uint8 [num_ranks, n] of all, in rank order."""

    rank: int
    num_ranks: int
    run: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def over(cls, parallel: ParallelState) -> Gather:
        return cls(parallel.rank, parallel.tp, lambda piece_B: all_gather(piece_B, parallel)[0])


def gather_if_faster(parallel: ParallelState) -> Gather | None:
    """Where the ranks' links are faster than a disk: GPUs of one host that reach each other's memory, through NCCL.

    None elsewhere: ranks on CPUs of one host share its page cache, and a network may be slower than a disk."""
    if parallel.is_alone or not dist.is_initialized() or dist.get_backend(parallel.group) != "nccl":
        return None
    return Gather.over(parallel) if peer_obstacle(parallel) is None else None


class Fragment(NamedTuple):
    """Bytes of a file that one rank reads; at: where they go in its piece."""

    extent: Extent
    at: int


class Batch(NamedTuple):
    """Tensors of one file side by side, each from its place on, cut into as many pieces of `piece` bytes as there are
    ranks; the last ones may hold less, or nothing."""

    places: list[tuple[Wish, int]]
    piece: int

    def fragments(self, rank: int) -> list[Fragment]:
        """What `rank` reads, in the order of the file; none is longer than a reader's span."""
        begin, end = rank * self.piece, (rank + 1) * self.piece
        most = SPAN_BYTES - ALIGNMENT
        found = []
        for wish, place in self.places:
            extent = wish.extent
            start, stop = max(place, begin), min(place + extent.size, end)
            for at in range(start, stop, most):
                size = min(most, stop - at)
                found.append(Fragment(Extent(extent.file, extent.offset + at - place, size), at - begin))
        return found

    def spans(self, rank: int) -> list[Span]:
        """The fragments as they are read; of one file, so in the order of `fragments`."""
        return plan_spans(fragment.extent for fragment in self.fragments(rank))


class Step(NamedTuple):
    """Of one file, its integers or the rest: batches for all ranks, then what this rank alone wants."""

    batches: list[Batch]
    own: list[Wish]

    def spans(self, rank: int) -> list[Span]:
        return [span for batch in self.batches for span in batch.spans(rank)] + tensor_reader.plan(self.own)


def plan(wishes: list[Wish], num_ranks: int) -> list[Step]:
    """File by file, integers last for the reason that `tensor_reader.plan` has. Every rank finds the same batches in
    the same order, also where it wants nothing else of a file."""
    groups: dict[tuple, list[Wish]] = defaultdict(list)
    for wish in wishes:
        groups[str(wish.header.file), wish.header.dtype == "I32"].append(wish)
    steps = []
    for _, group in sorted(groups.items()):
        shared = [wish for wish in group if is_shared(wish)]
        steps.append(Step(_batches(shared, num_ranks), [wish for wish in group if not is_shared(wish)]))
    return steps


def is_shared(wish: Wish) -> bool:
    return wish.is_everywhere and not wish.on_host


def _batches(wishes: list[Wish], num_ranks: int) -> list[Batch]:
    """Each of at most BATCH_BYTES, unless one tensor alone is longer."""
    batches: list[Batch] = []
    places: list[tuple[Wish, int]] = []
    end = 0
    for wish in sorted(wishes, key=lambda wish: (wish.extent.offset, wish.extent.size, wish.name)):
        size = wish.extent.size
        if places and _up(end, _PLACE) + size > BATCH_BYTES:
            batches.append(_batch(places, end, num_ranks))
            places, end = [], 0
        place = _up(end, _PLACE)
        places.append((wish, place))
        end = place + size
    return [*batches, _batch(places, end, num_ranks)] if places else batches


def _batch(places: list[tuple[Wish, int]], size: int, num_ranks: int) -> Batch:
    return Batch(places, _up(-(-size // num_ranks), ALIGNMENT))


def read(wishes: list[Wish], device: torch.device, gather: Gather) -> Iterator[tuple[Wish, torch.Tensor]]:
    """As `tensor_reader.read`, with the same values; all ranks must read at the same time.

    Beside the reader's ring it takes memory on `device` for a batch and this rank's piece of it. A rank that stops in
    between leaves the others waiting in a collective, as one that fails in a step does."""
    steps = plan(wishes, gather.num_ranks)
    reader = tensor_reader.open_reader([span for step in steps for span in step.spans(gather.rank)], device)
    with closing(iter(reader)) as spans:
        for step in steps:
            for batch in step.batches:
                piece_B = _read_piece(batch, gather.rank, spans, reader, device)
                yield from _gathered(batch, gather.run(piece_B))
            own = islice(spans, len(tensor_reader.plan(step.own)))
            yield from tensor_reader.hand_out(step.own, own, reader, device)


def _read_piece(batch: Batch, rank: int, spans, reader, device: torch.device) -> torch.Tensor:
    """This rank's piece on the device, uint8 [piece]; what it does not fill is never looked at."""
    places = iter(batch.fragments(rank))
    piece_B = torch.empty(batch.piece, dtype=torch.uint8, device=device)
    for span, bytes_B in islice(spans, len(batch.spans(rank))):
        for extent, fragment in zip(span.extents, places, strict=False):  # they go on in the next span
            begin = extent.offset - span.start
            target_B = piece_B[fragment.at : fragment.at + extent.size]
            target_B.copy_(bytes_B[begin : begin + extent.size], non_blocking=True)
        tensor_reader.keep_until_copied(reader, device)
    return piece_B


def _gathered(batch: Batch, pieces_PB: torch.Tensor) -> Iterator[tuple[Wish, torch.Tensor]]:
    bytes_B = pieces_PB.flatten()
    for wish, place in batch.places:
        yield wish, wish.view(bytes_B[place : place + wish.extent.size])


def _up(count: int, by: int) -> int:
    return -(-count // by) * by
