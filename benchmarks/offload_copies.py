"""Copies of KV blocks between a device's cache and the host's pinned memory, timed.

A block of the cache [layers, blocks, block size, width] is one piece a layer. Either each piece is copied by itself, or
the pieces of several blocks are gathered in a buffer on the device that is copied at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.cache_plan import BLOCK_SIZE


@dataclass(frozen=True)
class CopyTimes:
    """direction: "to host" or "to device". seconds_a_block: median over the repeats."""

    way: str
    direction: str
    num_blocks: int
    block_bytes: int
    seconds_a_block: float

    def row(self) -> dict[str, Any]:
        return {
            "way": self.way,
            "direction": self.direction,
            "blocks": self.num_blocks,
            "us a block": self.seconds_a_block * 1e6,
            "GB/s": self.block_bytes / self.seconds_a_block / 1e9,
        }


class BlockCopier:
    """Copies `blocks` of a cache to and from a pinned buffer [blocks, layers, block size, width]."""

    def __init__(self, cache: torch.Tensor, num_blocks: int):
        self.cache = cache
        layers, _, size, width = cache.shape
        self.staging = torch.empty(num_blocks, layers, size, width, dtype=cache.dtype, device=cache.device)
        pinned = cache.is_cuda
        self.host = torch.zeros(num_blocks, layers, size, width, dtype=cache.dtype, pin_memory=pinned)

    def strided_to_host(self, blocks: list[int]) -> None:
        for row, block in enumerate(blocks):
            for layer in range(self.cache.shape[0]):
                self.host[row, layer].copy_(self.cache[layer, block], non_blocking=True)

    def strided_to_device(self, blocks: list[int]) -> None:
        for row, block in enumerate(blocks):
            for layer in range(self.cache.shape[0]):
                self.cache[layer, block].copy_(self.host[row, layer], non_blocking=True)

    def gathered_to_host(self, blocks: list[int]) -> None:
        self.staging.copy_(self.cache[:, self._index(blocks)].transpose(0, 1))
        self.host.copy_(self.staging, non_blocking=True)

    def gathered_to_device(self, blocks: list[int]) -> None:
        self.staging.copy_(self.host, non_blocking=True)
        self.cache[:, self._index(blocks)] = self.staging.transpose(0, 1)

    def _index(self, blocks: list[int]) -> torch.Tensor:
        index = torch.tensor(blocks)
        return index.pin_memory().to(self.cache.device, non_blocking=True) if self.cache.is_cuda else index


def measure_copies(device: torch.device, layers: int, counts: list[int], width: int, repeats: int) -> list[CopyTimes]:
    """Of each way and direction at each number of blocks, which lie far from each other in a cache of four times as
    many."""
    found = []
    for count in counts:
        cache = torch.randn(layers, 4 * count + 1, BLOCK_SIZE, width, device=device).bfloat16()
        copier = BlockCopier(cache, count)
        blocks = (torch.randperm(4 * count, generator=torch.Generator().manual_seed(count)) + 1)[:count].tolist()
        for way in ("strided", "gathered"):
            for direction in ("to host", "to device"):
                call = getattr(copier, f"{way}_{direction.replace(' ', '_')}")
                seconds = _time(lambda call=call, blocks=blocks: call(blocks), device, repeats)
                bytes_a_block = cache[:, 0].nbytes
                found.append(CopyTimes(way, direction, count, bytes_a_block, seconds / count))
    return found


def _time(call: Callable[[], None], device: torch.device, repeats: int) -> float:
    samples = []
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
        samples.append(time.perf_counter() - started)
    return statistics.median(samples[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
