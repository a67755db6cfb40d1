"""Reads a Hugging Face checkpoint directory: which tensors there are, and this rank's part of each.

Strict: the files must hold exactly the tensors that the model names, with their shapes and types. Every header is
checked before any weight is read. Nothing in the directory is executed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.config import ConfigError
from engine.json_files import read_json

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER = 100 * 2**20
_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names file and tensor."""


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """What the model wants of one tensor.

    part: this rank's slice along each dimension, None where the rank needs nothing of it (it is still checked).
    store: takes the slice that was read; raises ValueError where the values themselves make no sense.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    part: tuple[slice, ...] | None
    store: Callable[[torch.Tensor], None]


class Checkpoint:
    """The headers of all files of a directory; weights are read by `load`."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.tensors: dict[str, TensorHeader] = {}
        index = _read_index(self.directory)
        for file in _files(self.directory, index):
            for name, header in read_header(file).items():
                if name in self.tensors:
                    raise CheckpointError(f"{file.name}: tensor {name} is also in {self.tensors[name].file.name}.")
                self.tensors[name] = header
        if index is not None:
            self._check_index(index)

    def _check_index(self, index: dict[str, str]) -> None:
        for name, file in index.items():
            header = self.tensors.get(name)
            if header is None or header.file.name != file:
                raise CheckpointError(f"{INDEX_NAME} places tensor {name} in {file}, but it is not there.")
        for name, header in self.tensors.items():
            if name not in index:
                raise CheckpointError(f"{header.file.name}: tensor {name} is not in {INDEX_NAME}.")

    def skip(self, prefixes: tuple[str, ...]) -> int:
        """Leaves out the tensors under `prefixes` and says how many there are."""
        skipped = [name for name in self.tensors if name.startswith(prefixes)]
        for name in skipped:
            del self.tensors[name]
        return len(skipped)

    def check(self, specs: dict[str, TensorSpec]) -> None:
        """Raises CheckpointError unless the files hold exactly what `specs` wants."""
        for name, spec in specs.items():
            header = self.tensors.get(name)
            if header is None:
                raise CheckpointError(f"{self.directory}: tensor {name} is missing from the checkpoint.")
            if header.shape != spec.shape:
                raise CheckpointError(
                    f"{header.file.name}: tensor {name} has shape {list(header.shape)}, the config asks for "
                    f"{list(spec.shape)}."
                )
            if header.dtype not in spec.dtypes:
                raise CheckpointError(
                    f"{header.file.name}: tensor {name} has type {header.dtype}, expected {' or '.join(spec.dtypes)}."
                )
        left_over = self.tensors.keys() - specs.keys()
        if left_over:
            name = min(left_over)
            raise CheckpointError(
                f"{self.tensors[name].file.name}: tensor {name} belongs to no part of this model"
                + (f" (and {len(left_over) - 1} more)." if len(left_over) > 1 else ".")
            )

    def load(self, specs: dict[str, TensorSpec]) -> None:
        """Reads this rank's part of each tensor, file by file; `specs` must have passed `check`."""
        for file, names in self._by_file(specs):
            with safe_open(file, framework="pt") as reader:
                for name in names:
                    part = specs[name].part
                    value = reader.get_slice(name)[part] if part else reader.get_tensor(name)
                    try:
                        _check_finite(value)
                        specs[name].store(value)
                    except ValueError as error:
                        raise CheckpointError(f"{file.name}: tensor {name} {error}") from error

    def _by_file(self, specs: dict[str, TensorSpec]) -> Iterator[tuple[Path, list[str]]]:
        files: dict[Path, list[str]] = {}
        for name, spec in specs.items():
            if spec.part is not None:
                files.setdefault(self.tensors[name].file, []).append(name)
        yield from files.items()


def _check_finite(value: torch.Tensor) -> None:
    """Raises ValueError for a weight or scale that would spoil every answer."""
    if value.is_floating_point() and not value.isfinite().all():
        raise ValueError("holds a value that is not a number or infinite; fetch the file again.")


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX_NAME
    if not path.is_file():
        return None
    try:
        index = read_json(path)["weight_map"]
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable index ({error}); fetch the file again.") from error
    if not isinstance(index, dict) or not all(_is_file_name(v) for v in index.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names of this directory.")
    return index


def _files(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{directory} holds no .safetensors file; give a Hugging Face checkpoint directory.")
        return files
    files = [directory / name for name in sorted(set(index.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {INDEX_NAME} names it; fetch the file again.")
    return files


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and len(name) <= 255 and "\0" not in name


def read_header(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file, after checking that its data is all there and does not overlap."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError("its header is longer than the file")
            entries = json.loads(stream.read(length))
    except (ValueError, RecursionError, struct.error, OSError) as error:
        raise CheckpointError(f"{file}: not a readable safetensors file ({error}); fetch it again.") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: not a readable safetensors file (no table of tensors); fetch it again.")
    entries.pop("__metadata__", None)
    headers, spans = {}, []
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise CheckpointError(f"{file}: the header's entry of tensor {name} makes no sense; fetch it again.")
        headers[name] = TensorHeader(file, entry["dtype"], tuple(entry["shape"]))
        spans.append((*entry["data_offsets"], name))
    _check_spans(file, size - 8 - length, sorted(spans), headers)
    return headers


def _is_entry(entry: Any) -> bool:
    """Whether one value of a header is {"dtype": text, "shape": counts, "data_offsets": [start, stop]}."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(count) is int and count >= 0 for count in shape + offsets)


def _check_spans(
    file: Path, data_bytes: int, spans: list[tuple[int, int, str]], headers: dict[str, TensorHeader]
) -> None:
    end = 0
    for start, stop, name in spans:
        header = headers[name]
        known = header.dtype in _DTYPE_BYTES
        wanted = math.prod(header.shape) * _DTYPE_BYTES[header.dtype] if known else stop - start
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
