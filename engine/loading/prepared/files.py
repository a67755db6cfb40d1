"""Files that appear whole or not at all, and one writer at a time for each.

Knows files and bytes, nothing of tensors.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sole_writer(path: Path) -> Iterator[bool]:
    """Whether this process, and no other until the block ends, may write `path`: a lock that ends with its process,
    on an empty file beside it, which stays. Raises OSError."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(path: Path) -> Iterator[int]:
    """A descriptor to write to, for the sole writer. When the block ends well the file is on the disk and takes its
    name, in place of what had it; else nothing of it is left, or, of a killed writer, what the next one removes here.
    Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
