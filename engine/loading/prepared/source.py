"""What a checkpoint's files are, told by all but their data: enough to see that they are the same as before."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from engine.loading.checkpoint_headers import CheckpointError
from engine.loading.weights import INDEX_NAME

_LENGTH = struct.Struct("<Q")


def source_key(directory: Path, files: Iterable[Path]) -> dict[str, str | None]:
    """Digests by name: of the index's text, None where there is none, and of each weight file's name, size, time of its
    last change and header. Links are followed. Raises CheckpointError."""
    index = directory / INDEX_NAME
    try:
        return {
            "index": digest(index.read_bytes()) if index.exists() else None,
            "weight files": _files_digest(files),
        }
    except (OSError, struct.error) as error:
        raise CheckpointError(f"{directory}: cannot be read any more ({error}); see that it stays there.") from error


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _files_digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        with open(file, "rb") as stream:
            facts = os.fstat(stream.fileno())
            head = stream.read(_LENGTH.size)
            header = stream.read(min(_LENGTH.unpack(head)[0], facts.st_size))
        found.update(f"{file.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode() + head + header)
    return found.hexdigest()[:32]
