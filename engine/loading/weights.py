"""Reads a Hugging Face checkpoint directory: which tensors there are, and this rank's part of each.

Strict: the files must hold exactly the tensors that the model names, with their shapes and types. Every header is
checked before any weight is read. Nothing in the directory is executed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.config import ConfigError
from engine.json_files import read_json
from engine.loading import shared_reads, tensor_reader
from engine.loading.checkpoint_headers import CheckpointError, TensorHeader, read_headers
from engine.loading.progress import LoadProgress
from engine.loading.shared_reads import Gather
from engine.loading.tensor_reader import Store, Wish

INDEX_NAME = "model.safetensors.index.json"
NOT_FINITE = "holds a value that is not a number or infinite; fetch the file again."


class TensorSpec(NamedTuple):
    """What the model wants of one tensor.

    part: this rank's slice along each dimension, None where the rank needs nothing of it (it is still checked).
    store: takes the slice that was read; raises ValueError where the values themselves make no sense.
    on_host: a table that `store` looks at itself, which on a device would mean to wait for it.
    is_everywhere: each rank wants the same rows, if perhaps other columns of them, and says so.
    is_in_group: each rank of this one's expert group does, and no other.
    rows: the store of some of the part's rows, where a long tensor may come in pieces; None: it comes whole.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    part: tuple[slice, ...] | None
    store: Store
    on_host: bool = False
    is_everywhere: bool = False
    is_in_group: bool = False
    rows: Callable[[slice], Store] | None = None


class Checkpoint:
    """The headers of all files of a directory; weights are read by `load`.

    files: those that hold tensors. tensors: name -> header, of all of them."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        index = _read_index(self.directory)
        self.files = _files(self.directory, index)
        self.tensors: dict[str, TensorHeader] = read_headers(self.files)
        self._num_skipped = 0
        if index is not None:
            self._check_index(index)

    def _check_index(self, index: dict[str, str]) -> None:
        files = {file.name: file for file in self.files}
        for name, file in index.items():
            header = self.tensors.get(name)
            if header is None or header.file is not files[file]:
                raise CheckpointError(f"{INDEX_NAME} places tensor {name} in {file}, but it is not there.")
        for name in self.tensors.keys() - index.keys():
            raise CheckpointError(f"{self.tensors[name].file.name}: tensor {name} is not in {INDEX_NAME}.")

    def skip(self, prefixes: tuple[str, ...]) -> int:
        """Leaves out the tensors under `prefixes`, and says how many have been left out so far."""
        skipped = [name for name in self.tensors if name.startswith(prefixes)]
        for name in skipped:
            del self.tensors[name]
        self._num_skipped += len(skipped)
        return self._num_skipped

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

    def load(
        self,
        specs: dict[str, TensorSpec],
        device: torch.device | None = None,
        progress: LoadProgress | None = None,
        gather: Gather | None = None,
        is_alone: bool = False,
    ) -> None:
        """Reads this rank's part of each tensor and hands it to its store, on `device`, by default the host; `specs`
        must have passed `check`. A store must copy what it keeps. progress: counts the bytes. gather: how ranks that
        load at the same time give each other what all of them want; None: each reads for itself. is_alone: no other
        rank reads these files.

        Raises CheckpointError naming file and tensor."""
        wishes, checks, progress = self.wishes(specs), FiniteChecks(), progress or LoadProgress()
        progress.expect(sum(wish.extent.size for wish in wishes))
        pieces = [piece for wish in wishes for piece in _pieces(wish, specs[wish.name])]
        if is_alone:
            pieces = [piece._replace(is_everywhere=False, is_in_group=False) for piece in pieces]
        try:
            for wish, value in _read(pieces, device or torch.device("cpu"), gather):
                _store(wish, value, checks)
                progress.add(wish.extent.size)
        except OSError as error:
            raise CheckpointError(f"{self.directory}: {error}; see that its files stay as they are.") from error
        checks.finish()

    def wishes(self, specs: dict[str, TensorSpec]) -> list[Wish]:
        """What of the files this rank reads."""
        return [
            Wish(name, self.tensors[name], spec.part, spec.on_host, spec.is_everywhere, spec.store, spec.is_in_group)
            for name, spec in specs.items()
            if spec.part is not None
        ]

    def read(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """This rank's part of one tensor, once more, on the host."""
        ((_, value),) = tensor_reader.read([Wish(name, self.tensors[name], spec.part)], torch.device("cpu"))
        return value


def _read(wishes: list[Wish], device: torch.device, gather: Gather | None) -> Iterator[tuple[Wish, torch.Tensor]]:
    return tensor_reader.read(wishes, device) if gather is None else shared_reads.read(wishes, device, gather)


def _pieces(wish: Wish, spec: TensorSpec) -> list[Wish]:
    return [wish] if spec.rows is None else wish.in_pieces(spec.rows)


def _store(wish: Wish, value: torch.Tensor, checks: FiniteChecks) -> None:
    try:
        checks.add(wish, value)
        wish.store(value)
    except ValueError as error:
        raise CheckpointError(f"{wish.header.file.name}: tensor {wish.name} {error}") from error


class FiniteChecks:
    """Finds weights or scales that would spoil every answer. Those of a device are looked at together at the end, since
    each look waits for it.

    The least and the greatest value tell, as both are NaN where one is: a tenth of the time of looking at each."""

    def __init__(self) -> None:
        self._pending: dict[torch.dtype, list[tuple[Wish, torch.Tensor]]] = defaultdict(list)

    def add(self, wish: Wish, value: torch.Tensor) -> None:
        """Raises ValueError at once for a tensor of the host."""
        if not value.is_floating_point() or not value.numel():
            return
        bounds = value.aminmax()
        if value.is_cuda:
            self._pending[value.dtype] += [(wish, bounds.min), (wish, bounds.max)]
        elif not all(bound.isfinite() for bound in bounds):
            raise ValueError(NOT_FINITE)

    def finish(self) -> None:
        """Raises CheckpointError naming the first file and tensor."""
        for pending in self._pending.values():
            flags = torch.stack([bound for _, bound in pending]).isfinite().tolist()
            for (wish, _), is_finite in zip(pending, flags, strict=True):
                if not is_finite:
                    raise CheckpointError(f"{wish.header.file.name}: tensor {wish.name} {NOT_FINITE}")


def weight_files(directory: str | Path) -> list[Path]:
    """The files that hold a checkpoint's tensors. Raises CheckpointError for one that is missing."""
    return _files(Path(directory), _read_index(Path(directory)))


def has_packed_experts(directory: str | Path) -> bool | None:
    """Whether the index, or a lone file's header, names packed weights; None where there are no weights."""
    directory = Path(directory)
    names = _read_index(directory)
    if names is None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            return None
        names = read_headers(files)
    return any(name.endswith(".weight_packed") for name in names)


def _read_index(directory: Path) -> dict[str, str] | None:
    path = directory / INDEX_NAME
    if not path.is_file():
        return None
    try:
        index = read_json(path)["weight_map"]
    except (ConfigError, KeyError) as error:
        raise CheckpointError(f"{path}: not a readable index ({error}); fetch the file again.") from error
    if not isinstance(index, dict) or not all(map(_is_file_name, _distinct(index.values()))):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names of this directory.")
    return index


def _files(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is None:
        files = sorted(directory.glob("*.safetensors"))
        if odd := next((file for file in files if file.exists() and not file.is_file()), None):
            raise CheckpointError(f"{odd} is not a file; give a Hugging Face checkpoint directory.")
        if not files:
            raise CheckpointError(f"{directory} holds no .safetensors file; give a Hugging Face checkpoint directory.")
        return files
    if not index:
        raise CheckpointError(f"{directory / INDEX_NAME}: names no tensor; fetch the file again.")
    files = [directory / name for name in sorted(set(index.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but {INDEX_NAME} names it; fetch the file again.")
    return files


def _distinct(values: Iterable[Any]) -> Iterable[Any]:
    """Each once; all of them where one, being no text, cannot be compared."""
    values = list(values)
    return set(values) if all(type(value) is str for value in values) else values


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and len(name) <= 255 and "\0" not in name
