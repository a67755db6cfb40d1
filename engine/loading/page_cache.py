"""What of files is in the kernel's page cache, and how to get it out.

Knows files and bytes, nothing of who reads them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_WINDOW_BYTES = 2**30  # looked at at once


def drop(files: Iterable[Path]) -> None:
    """Writes back and forgets what is cached of `files`; pages that someone maps stay."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Iterable[Path]) -> float | None:
    """Pages of `files` that are cached, of all; None where the kernel does not tell."""
    cached = pages = 0
    for file in files:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            for start in range(0, size, _WINDOW_BYTES):
                window = min(_WINDOW_BYTES, size - start)
                found = cached_pages(stream.fileno(), start, window)
                if found is None:
                    return None
                cached += found
                pages += -(-window // mmap.PAGESIZE)
    return cached / pages if pages else None


def cached_pages(descriptor: int, start: int, size: int) -> int | None:
    """How many pages of bytes [start, start + size) of a file are cached; start: a multiple of the page size.

    None where the kernel does not tell: other systems than Linux, and files that are another user's."""
    if size <= 0 or not _may_ask(descriptor):
        return None if size > 0 else 0
    libc = _libc()
    if libc is None:
        return None
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address in (None, ctypes.c_void_p(-1).value):
        return None
    flags = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    failed = libc.mincore(address, size, flags)
    libc.munmap(address, size)
    return None if failed else len(flags.raw.translate(None, _EVEN))  # the lowest bit alone says it


_EVEN = bytes(range(0, 256, 2))


def _may_ask(descriptor: int) -> bool:
    """Of others' files the kernel says that all of it is cached."""
    return hasattr(os, "geteuid") and os.geteuid() in (0, os.fstat(descriptor).st_uid)


@cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc
