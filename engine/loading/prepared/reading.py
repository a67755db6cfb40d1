"""Reads a prepared file into the tensors of its layout, with every check before or beside it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import torch

from engine.loading import tensor_reader
from engine.loading.checkpoint_headers import TensorHeader
from engine.loading.prepared.layout import Chunk, Layout, checksum
from engine.loading.progress import LoadProgress
from engine.loading.tensor_reader import Wish


class RefusedError(ValueError):
    """A file that is not used; the message is the reason."""


def read(path: Path, layout: Layout, device: torch.device, progress: LoadProgress) -> None:
    """Fills the tensors, which are on `device`. progress: counts the bytes, all of them also where reading fails.

    Raises RefusedError, and OSError as files do; the tensors may hold anything then."""
    wanted, left = read_sums(path, layout), layout.data_bytes
    progress.expect(left)
    found: dict[int, torch.Tensor] = {}
    try:
        for wish, bytes_B in tensor_reader.read(_wishes(path, layout.chunks), device):
            number = int(wish.name)
            memory_B = layout.chunks[number].memory
            found[number] = checksum(bytes_B)
            memory_B.copy_(bytes_B[: memory_B.numel()])
            progress.add(memory_B.numel())
            left -= memory_B.numel()
    finally:
        progress.add(left)
    _compare(layout.chunks, wanted, found)


def _wishes(path: Path, chunks: list[Chunk]) -> list[Wish]:
    """Named by the chunks' numbers."""
    headers = [TensorHeader(path, "U8", (chunk.file_bytes,), chunk.offset) for chunk in chunks]
    return [Wish(str(number), header, (slice(None),)) for number, header in enumerate(headers)]


def _compare(chunks: list[Chunk], wanted: list[int], found: dict[int, torch.Tensor]) -> None:
    """At the end, since each look at a device waits for it."""
    sums = torch.stack([found[number] for number in range(len(chunks))]).tolist() if chunks else []
    for chunk, one, other in zip(chunks, wanted, sums, strict=True):
        if one != other:
            stop = chunk.start + chunk.memory.numel()
            raise RefusedError(f"bytes {chunk.start} to {stop} of {chunk.tensor}, or their checksum, are damaged")


def read_sums(path: Path, layout: Layout) -> list[int]:
    """The checksums of the chunks, from a file of just this layout. Raises as `read`."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise RefusedError("it is not a regular file")
    with open(path, "rb") as stream:
        start = stream.read(len(layout.header))
        if start != layout.header:
            raise RefusedError(layout.difference(start))
        size = os.fstat(stream.fileno()).st_size
        if size != layout.num_bytes:
            how = "was cut short" if size < layout.num_bytes else "is too long"
            raise RefusedError(f"it {how}: {size} bytes instead of {layout.num_bytes}")
        stream.seek(layout.sums_offset)
        return layout.unpack_sums(stream.read())
