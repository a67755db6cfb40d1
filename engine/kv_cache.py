"""Which blocks of the KV cache belong to which request, and which it finds filled. Pure bookkeeping, no tensors."""

from __future__ import annotations

import itertools

from engine.block_pool import BlockPool
from engine.host_cache import HostCache
from engine.prefix_cache import BlockDigests
from engine.request import Request


class KVCacheManager:
    """Grows and frees the block lists of requests; a changed list that is not just longer is a new list.

    With `enable_prefix_caching` a request takes over the blocks of an equal beginning, whoever computed them.
    `lookahead`: as in engine.prefix_cache. Blocks become findable when the step that fills them is scheduled: another
    request may have them in the same step, since in each layer all KV is written before any is read. Blocks that are
    evicted go to num_host_blocks on the host, if there are any.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = False,
        lookahead: int = 0,
        num_host_blocks: int = 0,
    ):
        self.host = HostCache(num_host_blocks)
        self.pool = BlockPool(num_blocks, self.host.save if num_host_blocks else None)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._digests = BlockDigests(block_size, lookahead)
        self.query_tokens = self.hit_tokens = 0

    @property
    def max_tokens(self) -> int:
        """The longest sequence the whole cache can hold."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that requests hold, 0 to 1."""
        return self.pool.num_held / self.pool.num_usable

    @property
    def num_free(self) -> int:
        """Blocks with nothing in them; with `num_cached` and `num_held` all there are."""
        return self.pool.num_free - self.pool.num_idle

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds, kept for those to come."""
        return self.pool.num_idle

    @property
    def num_held(self) -> int:
        return self.pool.num_held

    def admit(self, request: Request, most_restored: int | None = None) -> bool:
        """Room for all tokens of a request that has no blocks, which then counts as computed what was found; False, and
        nothing taken, if blocks run out, or if more than `most_restored` blocks have to come from the host: so many of
        them come then, for it to find in the next step."""
        found = self._find(request)
        if not self._fits(request, found):
            return False
        self.pool.hold(found)
        slots = self._find_on_host(request, len(found))  # before others' blocks push their content out
        missing = self._num_blocks(request) - len(found)
        is_part = most_restored is not None and len(slots) > most_restored
        if is_part:
            slots, missing = slots[:most_restored], most_restored
        blocks = found + self.pool.take(missing)
        self._restore(request, blocks[len(found) :], len(found), slots)
        if is_part:
            self.pool.give_back(blocks)
            return False
        request.block_ids = blocks
        request.num_named_blocks = len(found) + len(slots)
        if self._counts(request) and self._may_find(request):
            self.query_tokens += request.num_tokens
        self._skip(request, request.num_named_blocks * self.block_size)
        return True

    def has_room(self, request: Request) -> bool:
        """Whether `admit` would find room now."""
        return self._fits(request, self._find(request))

    def _num_blocks(self, request: Request) -> int:
        return -(-request.num_tokens // self.block_size)

    def _fits(self, request: Request, found: list[int]) -> bool:
        missing = self._num_blocks(request) - len(found)
        return missing <= self.pool.num_free - sum(map(self.pool.is_idle, found))

    def _find_on_host(self, request: Request, first: int) -> list[int]:
        """Slots of what comes after the first blocks."""
        return self.host.find(self._wanted(request, first)) if self.host.num_slots else []

    def _restore(self, request: Request, blocks: list[int], first: int, slots: list[int]) -> None:
        """What is brought back can be found at once, since it is there before the next step computes."""
        for block, digest, slot in zip(blocks, request.block_digests[first:], slots, strict=False):
            self.host.restore(slot, block)
            self.pool.name(block, digest)

    def _find(self, request: Request, first: int = 0) -> list[int]:
        """The blocks that are there of what continues its first blocks, up to one that is not."""
        found = map(self.pool.find, self._wanted(request, first))
        return list(itertools.takewhile(lambda block: block is not None, found))

    def _wanted(self, request: Request, first: int) -> list[bytes]:
        """What it may take over behind its first blocks. One token at least is left to compute."""
        if not self._may_find(request):
            return []
        num_full = min((request.num_tokens - 1) // self.block_size, self._num_known(request))
        return self._digests.of(request, num_full)[first:num_full]

    def catch_up(self, request: Request) -> None:
        """A request amid its prompt takes over what others have computed of it meanwhile."""
        first = request.num_computed_tokens // self.block_size
        if request.num_computed_tokens % self.block_size:
            return
        found = self._find(request, first)
        if found:
            stop = first + len(found)
            self.pool.hold(found)
            self.pool.give_back(request.block_ids[first:stop])
            request.block_ids = request.block_ids[:first] + found + request.block_ids[stop:]
            request.num_named_blocks = stop
            self._skip(request, len(found) * self.block_size)

    def _skip(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        if self._counts(request):
            request.num_cached_tokens += num_tokens
            self.hit_tokens += num_tokens

    def _counts(self, request: Request) -> bool:
        """What a request computes again after it lost its place is no one's prompt."""
        return self.enable_prefix_caching and not request.num_preemptions

    def _may_find(self, request: Request) -> bool:
        """Logprobs of a prompt take all of its rows."""
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def _num_known(self, request: Request) -> int:
        return self._digests.num_full(request.num_tokens - request.num_pending)

    def name_blocks(self, request: Request, num_computed: int) -> None:
        """Makes findable the blocks that `num_computed` tokens fill, as far as their tokens are known."""
        num_full = min(num_computed // self.block_size, len(request.block_ids))
        if num_full <= request.num_named_blocks or not self.enable_prefix_caching:
            return
        num_full = min(num_full, self._num_known(request))
        digests = self._digests.of(request, num_full)
        for index in range(request.num_named_blocks, num_full):
            self.pool.name(request.block_ids[index], digests[index])
        request.num_named_blocks = max(num_full, request.num_named_blocks)

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
        request.block_ids, request.num_named_blocks = [], 0

    def flush(self) -> None:
        """Nothing computed so far is found any more, nor what those that are here go on to compute by those that come.
        What requests hold stays theirs."""
        self.pool.forget_all()
        self.host.clear()
        self._digests.flush()
