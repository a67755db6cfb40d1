"""The arms of `python -m engine.bench load` as one rank runs them: the same weights in several ways."""

from __future__ import annotations

import gc
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.bench.load_memory import MemoryTrace
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.loading.extent_reader import ALIGNMENT, MOST_SKIPPED, Extent
from engine.loading.tensor_reader import Wish
from engine.log import logger
from engine.model_files import ModelFiles
from engine.model_loading import open_share, preparation

CHUNK_BYTES = 16 * 2**20
DISK_THREADS = 4
PREPARE = "prepare"  # what comes before the arm `prepared`, and is not measured


@dataclass
class Sample:
    """One arm on one rank. began, ended: of the host's monotonic clock. num_bytes: that the arm was to read;
    from_disk: what of the disk's reads this process caused, None if unknown. host_peak, of it pinned_peak, and
    gpu_peak: beyond what there was before. weights: bytes of what was kept. parts: seconds of its parts."""

    began: float
    ended: float
    num_bytes: int
    from_disk: int | None
    host_peak: int
    pinned_peak: int
    gpu_peak: int
    weights: int
    parts: dict[str, float]
    trace: list[list[float]]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RankLoad:
    """What one rank of the world loads; a share of the files, nothing exchanged with others."""

    config: EngineConfig
    files: ModelFiles
    parallel: ParallelState
    wishes: list[Wish]

    @classmethod
    def of(cls, config: EngineConfig, rank: int) -> RankLoad:
        """config: resolved. Raises CheckpointError, ConfigError."""
        files = ModelFiles.read(config)
        device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
        parallel = ParallelState(rank, device=device, tp=config.tp, ep=config.ep, is_share=True)
        opened = open_share(config, files, replace(parallel, device=torch.device("meta")))
        return cls(config, files, parallel, opened.checkpoint.wishes(opened.specs))

    @property
    def extents(self) -> list[Extent]:
        return [wish.extent for wish in self.wishes]

    @property
    def num_bytes(self) -> int:
        return sum(extent.size for extent in self.extents)

    def run(self, arm: str, pieces: list[Extent]) -> Sample:
        """pieces: what a disk arm reads. What an arm keeps is gone when it returns."""
        work = {**{name: _disk(pieces, direct) for name, direct in DISK_ARMS.items()}, **self._loads()}[arm]
        before, on_gpu = disk_bytes(), self.parallel.device.type == "cuda"
        with MemoryTrace(on_gpu) as memory:
            began = time.monotonic()
            kept, parts = work()
            if on_gpu:
                torch.cuda.synchronize()
            ended = time.monotonic()
        after, weights = disk_bytes(), sum(tensor.nbytes for tensor in kept)
        read = pieces if arm in DISK_ARMS else self.extents
        del kept
        _give_back(on_gpu)
        return Sample(
            began,
            ended,
            weights if arm == "prepared" else sum(extent.size for extent in read),
            None if before is None or after is None else after - before,
            memory.host_peak,
            memory.pinned_peak,
            memory.gpu_peak,
            weights,
            parts,
            memory.points,
        )

    def _loads(self) -> dict[str, Callable[[], tuple[list[torch.Tensor], dict[str, float]]]]:
        return {
            "load": self._load, PREPARE: self._prepare, "prepared": self._prepared, "safe_open": self._safe_open
        }  # fmt: skip

    def _load(self) -> tuple[list[torch.Tensor], dict[str, float]]:
        """As the engine starts: headers, model, weights read and repacked."""
        opened = open_share(self.config, self.files, self.parallel)
        began = time.monotonic()
        opened.load()
        parts = {"index": opened.index_seconds, "build": opened.build_seconds, "read": time.monotonic() - began}
        return list(opened.model.state_dict().values()), parts

    def _prepare(self) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Leaves prepared weights in the configuration's directory, unless those that are there fit."""
        open_share(self.config, self.files, self.parallel).load(preparation=preparation(self.config))
        return [], {}

    def _prepared(self) -> tuple[list[torch.Tensor], dict[str, float]]:
        """As the engine starts with prepared weights: headers of the checkpoint, model, prepared file. Raises
        ConfigError where that is not used."""
        opened = open_share(self.config, self.files, self.parallel)
        began = time.monotonic()
        if not opened.load(preparation=preparation(self.config)):
            raise ConfigError("prepared weights were not there or not used; the reason is in the lines above.")
        parts = {"index": opened.index_seconds, "build": opened.build_seconds, "read": time.monotonic() - began}
        return list(opened.model.parameters()), parts

    def _safe_open(self) -> tuple[list[torch.Tensor], dict[str, float]]:
        """The loop that anyone would write: tensors as they stand in the files, nothing repacked."""
        kept, on_gpu = [], self.parallel.device.type == "cuda"
        for file, wishes in groupby(sorted(self.wishes, key=_place), key=lambda wish: wish.header.file):
            with safe_open(file, "pt", device=str(self.parallel.device)) as tensors:
                for wish in wishes:
                    value = _get(tensors, wish)
                    kept.append(value if on_gpu else value.clone())  # on the host it is a map of the file, not yet read
        return kept, {}


def _place(wish: Wish) -> tuple[str, int]:
    return str(wish.header.file), wish.header.start


def _get(tensors: Any, wish: Wish) -> torch.Tensor:
    whole = [(0, size, 1) for size in wish.header.shape]
    if [part.indices(size) for part, size in zip(wish.part, wish.header.shape, strict=True)] == whole:
        return tensors.get_tensor(wish.name)
    return tensors.get_slice(wish.name)[wish.part]


DISK_ARMS = {"disk": False, "disk O_DIRECT": True}


def _disk(pieces: list[Extent], direct: bool) -> Callable[[], tuple[list[torch.Tensor], dict[str, float]]]:
    """Large reads one behind the other, several at once, and a look at a byte of every page."""

    def work() -> tuple[list[torch.Tensor], dict[str, float]]:
        with ThreadPoolExecutor(DISK_THREADS) as pool:
            list(pool.map(lambda own: _read(own, direct), [pieces[i::DISK_THREADS] for i in range(DISK_THREADS)]))
        return [], {}

    return work


def _read(pieces: Iterable[Extent], direct: bool) -> int:
    """Returns the sum of the bytes it looked at. Raises OSError, also where there is no O_DIRECT."""
    buffer, total, files = mmap.mmap(-1, CHUNK_BYTES), 0, {}
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    bytes_B = torch.frombuffer(buffer, dtype=torch.uint8)
    try:
        for piece in pieces:
            descriptor = files.setdefault(piece.file, None) or os.open(piece.file, flags)
            files[piece.file] = descriptor
            start = 0
            while start < piece.size:
                count = os.preadv(descriptor, [memoryview(buffer)[start : piece.size]], piece.offset + start)
                if count == 0:
                    break  # a last page that the file does not fill
                start += count
            total += int(bytes_B[: piece.size : ALIGNMENT].sum())
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return total


def pieces_of(extents: Iterable[Extent], ranks: int) -> list[list[Extent]]:
    """The union of all ranks' extents as aligned pieces of at most CHUNK_BYTES, an even run of them for each rank."""
    pieces: list[Extent] = []
    for extent in _union(extents):
        for start in range(extent.offset, extent.stop, CHUNK_BYTES):
            pieces.append(Extent(extent.file, start, min(CHUNK_BYTES, extent.stop - start)))
    total, done, shares = sum(piece.size for piece in pieces), 0, [[] for _ in range(ranks)]
    for piece in pieces:
        shares[done * ranks // total].append(piece)
        done += piece.size
    return shares


def _union(extents: Iterable[Extent]) -> list[Extent]:
    """Aligned, without overlap, over gaps that are cheaper read than left out."""
    union: list[Extent] = []
    for extent in sorted(extents, key=lambda e: (str(e.file), e.offset)):
        start, stop = extent.offset // ALIGNMENT * ALIGNMENT, -(-extent.stop // ALIGNMENT) * ALIGNMENT
        last = union[-1] if union else None
        if last is not None and last.file == extent.file and start - last.stop <= MOST_SKIPPED:
            union[-1] = last._replace(size=max(stop, last.stop) - last.offset)
        else:
            union.append(Extent(extent.file, start, stop - start))
    return union


def disk_bytes() -> int | None:
    """What this process has had read from disks so far, other processes' pages not counted; None where unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "read_bytes":
                return int(value)
    return None


def _give_back(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def extents_as_plain(extents: Iterable[Extent]) -> list[list[Any]]:
    return [[str(extent.file), extent.offset, extent.size] for extent in extents]


def extents_from_plain(values: Iterable[list[Any]]) -> list[Extent]:
    files: dict[str, Path] = {}
    return [Extent(files.setdefault(file, Path(file)), offset, size) for file, offset, size in values]


def quiet() -> None:
    """A rank's log lines would stand between those of the measurement."""
    logger.setLevel("WARNING")
