"""What several ranks want of the files is read once: each reads a piece, and they give each other the rest.

Whole tensors that are on all ranks, and those of which each takes some columns, so that it would read all rows: of all
ranks, or within an expert group. They go in batches, whose order and cuts every rank works out alike from headers and
specs; between the batches each rank reads what it alone wants. Its reader's threads go on reading ahead while ranks
exchange a batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine.comm.collectives import all_gather
from engine.comm.meter import CommMeter
from engine.comm.parallel_state import ParallelState
from engine.comm.peers import peer_obstacle
from engine.loading import tensor_reader
from engine.loading.extent_reader import ALIGNMENT, SPAN_BYTES, Extent, Span, plan_spans
from engine.loading.tensor_reader import Wish

BATCH_BYTES = 4 * SPAN_BYTES
_PLACE = 16  # bytes; where a tensor of any type may begin


class Gather(NamedTuple):
    """How this rank exchanges pieces with some others. run: uint8 [n] of this rank -> uint8 [num_ranks, n] of all of
    them, in rank order.

    open_group: the same among the ranks of this one's expert group, and what ends it; a collective of all ranks. None:
    there are no groups of more than one and fewer than all ranks."""

    rank: int
    num_ranks: int
    run: Callable[[torch.Tensor], torch.Tensor]
    open_group: Callable[[], tuple[Gather, Callable[[], None]]] | None = None

    @classmethod
    def over(cls, parallel: ParallelState) -> Gather:
        has_groups = 1 < parallel.expert_tp < parallel.tp
        open_group = (lambda: _open_group(parallel)) if has_groups else None
        return cls(parallel.rank, parallel.tp, lambda piece_B: all_gather(piece_B, parallel)[0], open_group)


def _open_group(parallel: ParallelState) -> tuple[Gather, Callable[[], None]]:
    group, _ = dist.new_subgroups(parallel.expert_tp, group=parallel.group)
    ranks = replace(parallel, rank=parallel.expert_tp_rank, tp=parallel.expert_tp, ep=1, group=group, meter=CommMeter())

    def run(piece_B: torch.Tensor) -> torch.Tensor:
        parallel.meter.enter_part()
        return all_gather(piece_B, ranks)[0]

    return Gather(ranks.rank, ranks.tp, run), lambda: dist.destroy_process_group(group)


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
    """Of one file, its integers or the rest: batches for all ranks, then those for its expert group, each with how they
    are exchanged, then what this rank alone wants."""

    batches: list[tuple[Gather, Batch]]
    own: list[Wish]

    def spans(self) -> list[Span]:
        together = [span for gather, batch in self.batches for span in batch.spans(gather.rank)]
        return together + tensor_reader.plan(self.own)


def plan(wishes: list[Wish], everyone: Gather, group: Gather | None = None) -> list[Step]:
    """File by file, integers last for the reason that `tensor_reader.plan` has. Every rank finds the same batches for
    all in the same order, also where it wants nothing else of a file, and those of a group the same for the group."""
    files: dict[tuple, dict[Gather | None, list[Wish]]] = defaultdict(lambda: defaultdict(list))
    for wish in wishes:
        gather = None if wish.on_host else everyone if wish.is_everywhere else group if wish.is_in_group else None
        files[str(wish.header.file), wish.header.dtype == "I32"][gather].append(wish)
    gathers = [gather for gather in (everyone, group) if gather is not None]
    return [
        Step(
            [(gather, batch) for gather in gathers for batch in _batches(found[gather], gather.num_ranks)], found[None]
        )
        for _, found in sorted(files.items(), key=lambda item: item[0])
    ]


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
    group, close_group = None, None
    if gather.open_group is not None and any(wish.is_in_group for wish in wishes):
        group, close_group = gather.open_group()
    steps = plan(wishes, gather, group)
    reader = tensor_reader.open_reader([span for step in steps for span in step.spans()], device)
    with closing(iter(reader)) as spans:
        for step in steps:
            for ranks, batch in step.batches:
                piece_B = _read_piece(batch, ranks.rank, spans, reader, device)
                yield from _gathered(batch, ranks.run(piece_B))
            own = islice(spans, len(tensor_reader.plan(step.own)))
            yield from tensor_reader.hand_out(step.own, own, reader, device)
    if close_group is not None:  # not after a failure: it would wait for ranks that are no more
        close_group()


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
