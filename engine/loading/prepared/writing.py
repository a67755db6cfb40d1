"""Writes a prepared file, in bounded memory and bounded time."""

from __future__ import annotations

import errno
import os
import time

import torch

from engine.loading.prepared.layout import CHUNK_BYTES, Layout, checksum

_WRITTEN_BACK_BYTES = 256 * 2**20  # so much waits in the page cache at most, where it would displace what others use
_ROOM_BYTES = 256 * 2**20
_UNJUDGED_SECONDS = 10.0  # a disk may begin slowly


def write(descriptor: int, layout: Layout, most_seconds: float) -> None:
    """All of the file, its room taken first; on the host one chunk at a time is held.

    Raises OSError, also where at the rate so far it would take more than most_seconds."""
    began, written_back, sums = time.monotonic(), 0, []
    _take_room(descriptor, layout.num_bytes, began + most_seconds / 2)
    _write_at(descriptor, layout.header, 0)
    staging_B = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    for chunk in layout.chunks:
        bytes_B = staging_B[: chunk.file_bytes]
        bytes_B[: chunk.memory.numel()].copy_(chunk.memory)
        bytes_B[chunk.memory.numel() :].zero_()
        sums.append(int(checksum(bytes_B)))
        _write_at(descriptor, memoryview(bytes_B.numpy()), chunk.offset)
        stop = chunk.offset + len(bytes_B)
        if stop - written_back >= _WRITTEN_BACK_BYTES:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, stop, os.POSIX_FADV_DONTNEED)
            written_back = stop
        _check_rate(time.monotonic() - began, stop / layout.num_bytes, most_seconds)
    _write_at(descriptor, layout.pack_sums(sums), layout.sums_offset)


def _take_room(descriptor: int, num_bytes: int, deadline: float) -> None:
    """In pieces, since a file system that cannot take room at once is written to block by block."""
    for start in range(0, num_bytes, _ROOM_BYTES):
        os.posix_fallocate(descriptor, start, min(_ROOM_BYTES, num_bytes - start))
        if time.monotonic() > deadline:
            raise OSError(errno.ETIMEDOUT, "the disk is slow: taking room took half of the time that writing may take")


def _check_rate(seconds: float, fraction: float, most_seconds: float) -> None:
    if seconds > _UNJUDGED_SECONDS and seconds / fraction > most_seconds:
        reason = f"the disk is slow: it would take {seconds / fraction:.0f} s, allowed are {most_seconds:.0f}"
        raise OSError(errno.ETIMEDOUT, reason)


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
