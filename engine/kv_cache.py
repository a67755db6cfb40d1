"""Which blocks of the KV cache belong to whom. Pure bookkeeping: block numbers only, no tensors.

Block 0 belongs to no one: padding rows write there.
"""

from __future__ import annotations

from collections import deque

from engine.request import Request


class BlockPool:
    """Free block numbers 1..num_blocks-1, handed out oldest first."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks, not {num_blocks}.")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def take(self, count: int) -> list[int]:
        """Raises IndexError when fewer than `count` are free."""
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


class KVCacheManager:
    """Grows and frees the block lists of requests."""

    def __init__(self, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def max_tokens(self) -> int:
        """The longest sequence the whole cache can hold."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's first `num_tokens` tokens; False, and nothing taken, if blocks run out."""
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.block_ids.extend(self.pool.take(missing))
        return True

    def free(self, request: Request) -> None:
        self.pool.give_back(request.block_ids)
        request.block_ids = []
