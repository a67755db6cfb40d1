"""From the parts of tensors that a rank wants to the tensors: which bytes of which files, in which order, cut how.

Rows are read alone, since they lie together in a file; columns do not, so the rows that hold them are read whole and
cut behind the copy to the device.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from engine.loading.checkpoint_headers import TensorHeader
from engine.loading.extent_reader import ALIGNMENT, SPAN_BYTES, Extent, ExtentReader, Span, plan_spans
from engine.loading.read_way import ReadWay

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Store = Callable[[torch.Tensor], None]


class Wish(NamedTuple):
    """A tensor and the slice of each of its dimensions that is wanted; on_host: not on the device; is_everywhere: each
    rank wants just these rows; store: who takes them; is_in_group: each rank of an expert group wants just these."""

    name: str
    header: TensorHeader
    part: tuple[slice, ...]
    on_host: bool = False
    is_everywhere: bool = False
    store: Store | None = None
    is_in_group: bool = False

    @property
    def rows(self) -> range:
        return range(*self.part[0].indices(self.header.shape[0])) if self.header.shape else range(1)

    @property
    def cuts_columns(self) -> bool:
        """Whether of each row a part is wanted."""
        sizes = zip(self.part[1:], self.header.shape[1:], strict=True)
        return any(len(range(*part.indices(size))) < size for part, size in sizes)

    @property
    def extent(self) -> Extent:
        """Of whole rows. Raises ValueError for rows that do not lie together."""
        if len(self.rows) > 1 and self.rows.step != 1:
            raise ValueError(f"tensor {self.name}: rows {self.rows} do not lie together.")
        row_bytes = TYPES[self.header.dtype].itemsize * math.prod(self.header.shape[1:])
        start = self.header.start + (self.rows.start if self.rows else 0) * row_bytes
        return Extent(self.header.file, start, len(self.rows) * row_bytes)

    def in_pieces(self, store_of: Callable[[slice], Store]) -> list[Wish]:
        """The same rows, a few after the other, where they are more than a span; store_of: who takes which of them."""
        rows, size = self.rows, self.extent.size
        if size <= SPAN_BYTES:
            return [self]
        step = max(1, (SPAN_BYTES - ALIGNMENT) * len(rows) // size)
        pieces = [range(start, min(start + step, len(rows))) for start in range(0, len(rows), step)]
        return [
            self._replace(
                part=(slice(rows.start + piece.start, rows.start + piece.stop), *self.part[1:]),
                store=store_of(slice(piece.start, piece.stop)),
            )
            for piece in pieces
        ]

    def view(self, bytes_B: torch.Tensor) -> torch.Tensor:
        """The wanted part in the bytes of `extent`: a view, unless they lie at an odd place."""
        dtype = TYPES[self.header.dtype]
        if bytes_B.storage_offset() % dtype.itemsize:
            bytes_B = bytes_B.clone()
        shape = (len(self.rows), *self.header.shape[1:]) if self.header.shape else ()
        rows = bytes_B.view(dtype).view(shape)
        return rows[(slice(None), *self.part[1:])] if self.header.shape else rows


def plan(wishes: list[Wish], span_bytes: int = SPAN_BYTES) -> list[Span]:
    """File by file in the order of the files. Of one file integers come last, as the words of packed matrices: their
    scales, which are small, can be kept until then, and nothing else need be.

    What other ranks read too makes common spans: tensors that are everywhere, and rows of which columns are wanted."""
    files: dict[object, dict[tuple[bool, bool], list[Extent]]] = defaultdict(lambda: defaultdict(list))
    for wish in wishes:
        files[wish.header.file][wish.header.dtype == "I32", wish.is_everywhere or wish.cuts_columns].append(wish.extent)
    spans: list[Span] = []
    for parts in files.values():
        for (_, is_common), extents in sorted(parts.items()):
            spans += [replace(span, is_common=is_common) for span in plan_spans(extents, span_bytes)]
    return spans


def read(wishes: list[Wish], device: torch.device) -> Iterator[tuple[Wish, torch.Tensor]]:
    """Each wish once, with the wanted part: on the device, or on the host where it is wanted there.

    What lies on the host is valid until the next is asked for. Raises OSError as files do.
    """
    reader = open_reader(plan(wishes), device)
    yield from hand_out(wishes, reader, reader, device)


def open_reader(spans: list[Span], device: torch.device) -> ExtentReader:
    may_be_direct = sum(span.size for span in spans if not span.is_common)
    return ExtentReader(spans, pinned=device.type == "cuda", way=ReadWay(may_be_direct))


def hand_out(
    wishes: list[Wish], spans: Iterable[tuple[Span, torch.Tensor]], reader: ExtentReader, device: torch.device
) -> Iterator[tuple[Wish, torch.Tensor]]:
    """What `read` yields, of the spans of just these wishes, in whatever order they come from `reader`. A span goes to
    the device as one copy."""
    names: dict[Extent, deque[Wish]] = defaultdict(deque)
    for wish in wishes:
        names[wish.extent].append(wish)
    for span, bytes_B in spans:
        found = [names[extent].popleft() for extent in span.extents]
        stays = [wish.on_host or device.type != "cuda" for wish in found]
        on_device_B = bytes_B if all(stays) else bytes_B.to(device, non_blocking=True)
        if not all(stays):
            keep_until_copied(reader, device)
        for wish, extent, stay in zip(found, span.extents, stays, strict=True):
            begin = extent.offset - span.start
            yield wish, wish.view((bytes_B if stay else on_device_B)[begin : begin + extent.size])


def keep_until_copied(reader: ExtentReader, device: torch.device) -> None:
    """The reader's present buffer is used again only when the copies to `device` that were asked for are done."""
    if device.type == "cuda":
        copied = torch.cuda.Event()
        copied.record()
        reader.release_with(copied.synchronize)
