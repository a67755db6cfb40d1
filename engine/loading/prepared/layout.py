"""Where a rank's tensors lie in its prepared file, and what tells such a file from every other.

    header: the key (a line of JSON), the tensors' names, types, shapes and places (another), zeros up to 4 KiB
    data: each tensor's bytes as they lie in memory, at a multiple of 4 KiB, in chunks of at most 16 MiB
    a checksum of each chunk (8 bytes, little-endian)

A reader makes the header anew from what it expects and compares: nothing that a file says is relied on.
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import torch

FORMAT_VERSION = 2
BLOCK_BYTES = 4096  # what reads past the page cache ask for
CHUNK_BYTES = 16 * 2**20
_WORDS_AT_ONCE = 2**18  # 2 MiB, which stay in a processor's cache
_OF_NOTHING = 0x6B8B4567327B23C6  # the checksum of zeros
_LONGEST_SHOWN = 60


class Chunk(NamedTuple):
    """memory: uint8, a view of a tensor's bytes from `start` on. offset: their place in the file, where zeros follow up
    to a whole block."""

    tensor: str
    start: int
    memory: torch.Tensor
    offset: int

    @property
    def file_bytes(self) -> int:
        return whole_blocks(self.memory.numel())


class Layout:
    """Of contiguous tensors of one device by name, for one key. key: JSON values by name. num_bytes: the whole file's.

    Raises ValueError for a tensor whose bytes do not lie together."""

    def __init__(self, key: dict[str, Any], tensors: dict[str, torch.Tensor]):
        places, end = {}, 0
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(f"the bytes of {name} do not lie together in memory.")
            places[name] = end
            end += whole_blocks(tensor.nbytes)
        self.key = {"format": FORMAT_VERSION} | key
        table = [[name, str(t.dtype), list(t.shape), places[name]] for name, t in tensors.items()]
        text = f"{json.dumps(self.key)}\n{json.dumps(table)}\n".encode()
        self.header = text.ljust(whole_blocks(len(text)), b"\0")
        start = len(self.header)
        self.chunks = [
            chunk for name, tensor in tensors.items() for chunk in _chunks(name, tensor, start + places[name])
        ]
        self.data_bytes = sum(chunk.memory.numel() for chunk in self.chunks)
        self.sums_offset = start + end
        self.num_bytes = self.sums_offset + 8 * len(self.chunks)

    def pack_sums(self, sums: list[int]) -> bytes:
        return struct.pack(f"<{len(self.chunks)}q", *sums)

    def unpack_sums(self, end: bytes) -> list[int]:
        return list(struct.unpack(f"<{len(self.chunks)}q", end))

    def difference(self, start: bytes) -> str:
        """Why a file that begins with `start` instead of `header` is not the one wanted."""
        try:
            key = json.loads(start.partition(b"\n")[0])
        except (ValueError, RecursionError):
            key = None
        if not isinstance(key, dict):
            return "it is no prepared file, or its header is damaged"
        for name in sorted(self.key | key):
            if key.get(name) != self.key.get(name):
                return f"it was prepared for {name} {_shown(key.get(name))}, wanted is {_shown(self.key.get(name))}"
        return "it holds other tensors, or its header is damaged"


def checksum(bytes_B: torch.Tensor) -> torch.Tensor:
    """int64 [] on the device of uint8 [n], n in whole blocks: the 64-bit words, the high half of each folded into its
    low one, times 1, 3, 5, ..., added up modulo 2^64, 2 MiB after the other, to a number that is not zero.

    A device need not be waited for. Each change within one word is found, since odd factors lose nothing; words that
    change places, bits that are stuck in many of them, and a hole where data and checksum were."""
    total = torch.full((), _OF_NOTHING, device=bytes_B.device)
    factors = torch.arange(1, 2 * min(bytes_B.numel() // 8, _WORDS_AT_ONCE), 2, device=bytes_B.device)
    for number, words in enumerate(bytes_B.view(torch.int64).split(_WORDS_AT_ONCE)):
        mixed = words >> 31  # the sign fills up, so that the highest bit changes many
        mixed ^= words
        mixed *= factors[: len(words)]
        total *= 3 + 2 * number  # so that the parts cannot change places either
        total += mixed.sum()
    return total


def whole_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _chunks(name: str, tensor: torch.Tensor, offset: int) -> list[Chunk]:
    memory_B = tensor.detach().view(-1).view(torch.uint8)
    starts = range(0, memory_B.numel(), CHUNK_BYTES)
    return [Chunk(name, start, memory_B[start : start + CHUNK_BYTES], offset + start) for start in starts]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
