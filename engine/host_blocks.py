"""Slots of the host's memory for KV blocks, and the copies between them and the device.

Shape letters: S slots, N blocks, L layers, B tokens a block, W elements of a row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import torch

from engine.config import ConfigError
from engine.log import logger

_AT_ONCE = 8  # blocks that are gathered on the device before they are copied, and scattered after
_CHUNK_BYTES = 2**30  # pinned memory is handed out in powers of two, so many at a time waste little


class HostBlocks:
    """`num_slots` slots of one entry of each of `parts`: a cache whose first dimension is blocks, as (shape of a block,
    dtype). All copies are made in the device's stream, in order, and the host waits for none of them.

    Raises ConfigError where the host has not so much memory to pin."""

    def __init__(self, num_slots: int, parts: list[tuple[tuple[int, ...], torch.dtype]], device: torch.device):
        self.num_slots, self._device = num_slots, device
        started = time.monotonic()
        try:
            self._parts = [_Part(num_slots, shape, dtype, device) for shape, dtype in parts]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"the host cannot keep {num_slots} KV blocks in pinned memory ({error}); lower kv_offload_gb."
            ) from error
        size = sum(part.num_bytes for part in self._parts)
        words = "room for %d cold KV blocks on the host, %.2f GiB, made in %.1f s"
        logger.info(words, num_slots, size / 2**30, time.monotonic() - started)

    def copy(self, saves: list[tuple[int, int]], restores: list[tuple[int, int]], caches: list[torch.Tensor]) -> None:
        """saves: (block, slot), first of all; restores: (slot, block). caches: [N, ...] each, in the order of parts."""
        for some in _batches(saves):
            blocks_n = self._send([block for block, _ in some])
            for part, cache in zip(self._parts, caches, strict=True):
                part.save(cache, blocks_n, [slot for _, slot in some])
        for some in _batches(restores):
            blocks_n = self._send([block for _, block in some])
            for part, cache in zip(self._parts, caches, strict=True):
                part.restore(cache, blocks_n, [slot for slot, _ in some])

    def _send(self, blocks: list[int]) -> torch.Tensor:
        tensor = torch.tensor(blocks)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


class _Part:
    """One cache's entries: host memory in chunks of [S, ...], and a buffer on the device."""

    def __init__(self, num_slots: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self._staging = torch.zeros(_AT_ONCE, *shape, dtype=dtype, device=device)
        self._chunk = max(_CHUNK_BYTES // self._staging[0].nbytes, 1)
        sizes = [min(self._chunk, num_slots - first) for first in range(0, num_slots, self._chunk)]
        pinned = device.type == "cuda"
        self._chunks = [torch.empty(size, *shape, dtype=dtype, pin_memory=pinned) for size in sizes]

    @property
    def num_bytes(self) -> int:
        """On the host."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def _slot(self, slot: int) -> torch.Tensor:
        return self._chunks[slot // self._chunk][slot % self._chunk]

    def save(self, cache: torch.Tensor, blocks_n: torch.Tensor, slots: list[int]) -> None:
        staging = self._staging[: len(slots)]
        torch.index_select(cache, 0, blocks_n, out=staging)
        for row, slot in zip(staging, slots, strict=True):
            self._slot(slot).copy_(row, non_blocking=True)

    def restore(self, cache: torch.Tensor, blocks_n: torch.Tensor, slots: list[int]) -> None:
        staging = self._staging[: len(slots)]
        for row, slot in zip(staging, slots, strict=True):
            row.copy_(self._slot(slot), non_blocking=True)
        cache.index_copy_(0, blocks_n, staging)


def _batches(pairs: list[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], ...]]:
    """Of at most _AT_ONCE pairs."""
    left = iter(pairs)
    return iter(lambda: tuple(itertools.islice(left, _AT_ONCE)), ())
