"""Block numbers of the KV cache: who holds them, and which of those that nobody holds are known by what is in them.

Block 0 belongs to no one: padding rows write there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class BlockPool:
    """Blocks 1..num_blocks-1. A block may be held by several; one that nobody holds any more but that has a digest can
    be found until its place is needed: the one given back longest ago goes first, and those without a digest before it.
    on_evict(block, digest) is told of each that does.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int, bytes], None] | None = None):
        if num_blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks, not {num_blocks}.")
        self.num_blocks, self._on_evict = num_blocks, on_evict
        self._empty = deque(range(1, num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_holders = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """That `take` can hand out: empty ones, and those kept for what is in them."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Of the free ones those kept for what is in them."""
        return len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_usable - self.num_free

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def take(self, count: int) -> list[int]:
        """Empty blocks, each with one holder. Raises IndexError, and takes none, when fewer than `count` are free."""
        if count > self.num_free:
            raise IndexError(f"{count} blocks were asked for, but {self.num_free} are free.")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            if self._on_evict is not None:
                self._on_evict(block, self._digests[block])
            self._forget(block)
        self._num_holders[block] = 1
        return block

    def hold(self, blocks: list[int]) -> None:
        """One holder more of each."""
        for block in blocks:
            self._num_holders[block] += 1
            self._idle.pop(block, None)

    def give_back(self, blocks: list[int]) -> None:
        """One holder less of each. A chain is given back from its end, since its end is of no use without its start."""
        for block in reversed(blocks):
            holders = self._num_holders[block] = self._num_holders[block] - 1
            if holders < 0:
                raise ValueError(f"block {block} was given back more often than it was held.")
            if holders == 0 and self._digests[block] is not None:
                self._idle[block] = None
            elif holders == 0:
                self._empty.append(block)

    def find(self, digest: bytes) -> int | None:
        return self._blocks.get(digest)

    def name(self, block: int, digest: bytes) -> None:
        """Makes a held block findable, unless another already is by that digest, or it is by one itself."""
        if self._digests[block] is None and self._blocks.setdefault(digest, block) == block:
            self._digests[block] = digest

    def forget_all(self) -> None:
        """No block can be found any more; those that are held stay with their holders."""
        for block in list(self._blocks.values()):
            self._forget(block)
        self._empty.extend(self._idle)
        self._idle.clear()

    def _forget(self, block: int) -> None:
        del self._blocks[self._digests[block]]
        self._digests[block] = None
