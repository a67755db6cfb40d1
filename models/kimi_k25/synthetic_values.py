"""Made-up values of a checkpoint's tensors, as bytes, as fast as memory: pools of random numbers read again and again
from other places. The same seed and name always give the same bytes, whatever file the tensor stands in.

They keep activations of order 1 through any number of layers, and routing diverse; they mean nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from models.kimi_k25.layout import PlannedTensor

CHUNK_BYTES = 8 * 2**20
NIBBLE_STD = math.sqrt((16**2 - 1) / 12)  # of uniform integers -8..7, about their mean
_UNIT_STD = 1 / math.sqrt(3)  # of uniform values -1..1


class Values:
    """Gives each tensor's bytes in chunks; holds three pools of twice CHUNK_BYTES and no tensor."""

    def __init__(self, seed: int):
        self._seed = seed
        random = np.random.Generator(np.random.SFC64(seed))
        count = 2 * CHUNK_BYTES
        self._words = np.frombuffer(random.bytes(count), np.uint64)
        uniform = random.random(count // 2, dtype=np.float32) * 2 - 1
        # No value is so small that a power of two could take its exponent below zero.
        uniform = np.copysign(np.maximum(np.abs(uniform), 2.0**-10), uniform)
        self._uniform = _bfloat16(uniform)
        # A nibble -8..7 has a mean: scales of one sign would give all rows a common direction that grows.
        self._scales = _bfloat16(np.copysign(0.5 + np.abs(uniform), random.random(count // 2, dtype=np.float32) - 0.5))

    def chunks(self, tensor: PlannedTensor) -> Iterator[memoryview]:
        """The tensor's bytes, row-major, little-endian; each chunk is read before the next is asked for."""
        digest = hashlib.blake2b(f"{self._seed} {tensor.name}".encode(), digest_size=8).digest()
        random = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
        if tensor.role in ("shape", "norm", "bias"):
            yield _small(tensor, random)
        elif tensor.role == "words":
            yield from self._mixed_words(tensor.num_bytes, random)
        else:
            yield from self._moved(tensor, random)

    def _mixed_words(self, num_bytes: int, random: np.random.Generator) -> Iterator[memoryview]:
        """Random bits, every chunk from another place of the pool and under another mask."""
        room = np.empty(CHUNK_BYTES // 8, np.uint64)
        for size in _sizes(num_bytes):
            count = -(-size // 8)
            start = random.integers(len(self._words) - count + 1)
            mask = random.integers(2**64, dtype=np.uint64)
            np.bitwise_xor(self._words[start : start + count], mask, out=room[:count])
            yield room.data.cast("B")[:size]

    def _moved(self, tensor: PlannedTensor, random: np.random.Generator) -> Iterator[memoryview]:
        """bfloat16 values of the pool times the power of two that fits the tensor, exactly: its exponent moves."""
        is_scale = tensor.role == "scale"
        pool, own = (self._scales, NIBBLE_STD) if is_scale else (self._uniform, _UNIT_STD)
        exponent = round(math.log2(tensor.fan_in**-0.5 / own))
        room = np.empty(CHUNK_BYTES // 2, np.uint16)
        for size in _sizes(tensor.num_bytes):
            count = size // 2
            start = random.integers(len(pool) - count + 1)
            np.add(pool[start : start + count], np.uint16((exponent << 7) % 2**16), out=room[:count])
            yield room.data.cast("B")[:size]


def _sizes(num_bytes: int) -> Iterator[int]:
    for start in range(0, num_bytes, CHUNK_BYTES):
        yield min(CHUNK_BYTES, num_bytes - start)


def _small(tensor: PlannedTensor, random: np.random.Generator) -> memoryview:
    count = math.prod(tensor.shape)
    if tensor.role == "shape":
        values = np.array(tensor.values, np.int32)
    elif tensor.role == "norm":
        values = _bfloat16(random.uniform(0.8, 1.2, count).astype(np.float32))
    else:  # near the router's selected scores a tenth of a logit: more would favour the same experts
        values = random.uniform(-0.01, 0.01, count).astype(np.float32)
        values = values if tensor.dtype == "F32" else _bfloat16(values)
    return values.data.cast("B")


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, uint16."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
