"""The headers of safetensors files: which tensors there are and where, with every check that needs no tensor's data.

The full checkpoint has 208,550 tensors, so what is done for each is kept short.
"""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_MAX_HEADER = 100 * 2**20
_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}
_READERS = 16


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names file and tensor."""


class TensorHeader(NamedTuple):
    """What a file's header says of one tensor, whose data begins at byte `start` of the file. All tensors of a file
    share one `file` object."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0


def read_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """The tensors of all files. Raises CheckpointError naming file and tensor, also for one that two files hold."""
    tensors: dict[str, TensorHeader] = {}
    with ThreadPoolExecutor(_READERS) as pool, without_collection():
        for file, (text, data_bytes) in zip(files, pool.map(_header_text, files), strict=True):
            headers = _parse(file, text, data_bytes)
            for name in tensors.keys() & headers.keys():
                raise CheckpointError(f"{file.name}: tensor {name} is also in {tensors[name].file.name}.")
            tensors.update(headers)
    return tensors


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file, after checking that its data is all there and does not overlap."""
    return _parse(file, *_header_text(file))


@contextmanager
def without_collection() -> Iterator[None]:
    """For making hundreds of thousands of objects without a cycle among them: to look for one takes longer than all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _header_text(file: Path) -> tuple[bytes, int]:
    """The header's JSON and the number of bytes behind it."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError("its header is longer than the file")
            return stream.read(length), size - 8 - length
    except (ValueError, struct.error, OSError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, reason: object) -> CheckpointError:
    return CheckpointError(f"{file}: not a readable safetensors file ({reason}); fetch it again.")


def _parse(file: Path, text: bytes, data_bytes: int) -> dict[str, TensorHeader]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(entries, dict):
        raise _unreadable(file, "no table of tensors")
    entries.pop("__metadata__", None)
    headers, spans, data_start = {}, [], 8 + len(text)
    for name, entry in entries.items():
        start, stop, size, header = _entry(file, name, entry, data_start)
        headers[name] = header
        spans.append((start, stop, size, name))
    spans.sort()
    _check_spans(file, data_bytes, spans)
    return headers


def _entry(file: Path, name: str, entry: Any, data_start: int) -> tuple[int, int, int, TensorHeader]:
    """(start, stop, bytes that type and shape ask for, header) of one value of a header; it must be {"dtype": text,
    "shape": counts, "data_offsets": [start, stop]}. A type that is not known has the size it takes."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _senseless(file, name) from None
    if type(dtype) is not str or type(shape) is not list or type(start) is not int or type(stop) is not int:
        raise _senseless(file, name)
    size = _DTYPE_BYTES.get(dtype)
    wanted = stop - start if size is None else size
    for count in shape:
        if type(count) is not int or count < 0:
            raise _senseless(file, name)
        if size is not None:
            wanted *= count
    if start < 0 or wanted < 0:
        raise _senseless(file, name)
    return start, stop, wanted, TensorHeader(file, dtype, tuple(shape), data_start + start)


def _senseless(file: Path, name: str) -> CheckpointError:
    return CheckpointError(f"{file}: the header's entry of tensor {name} makes no sense; fetch it again.")


def _check_spans(file: Path, data_bytes: int, spans: list[tuple[int, int, int, str]]) -> None:
    """spans: (start, stop, wanted bytes, name) by place."""
    end = 0
    for start, stop, wanted, name in spans:
        if start != end or stop - start != wanted:
            raise CheckpointError(f"{file}: tensor {name} has a wrong place or size in the file; fetch it again.")
        if stop > data_bytes:
            raise CheckpointError(
                f"{file}: tensor {name} ends at byte {stop}, but the file holds {data_bytes}: it was cut short; "
                "fetch it again."
            )
        end = stop
    if end < data_bytes:
        raise CheckpointError(f"{file}: {data_bytes - end} bytes at its end belong to no tensor; fetch it again.")
