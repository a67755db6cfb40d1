"""What makes two KV blocks hold the same: a digest of everything that the block's content depends on.

The chain is (digest of the block before, the block's tokens), with the cache salt and the number of flushes at its
root. With `lookahead` = 1 the token after the block belongs to it as well: a draft's KV at a position depends on the
token that follows (Li et al. 2025, section 3.1), so a block whose last entry was made for another next token is not the
same.
"""

from __future__ import annotations

import hashlib
from array import array

from engine.request import Request

_DIGEST_BYTES = 16


class BlockDigests:
    """Digests of a request's full blocks, as far as its tokens are known; kept with the request and only ever longer.

    Every process must compute the same ones, so no hash of Python's own that is seeded anew in each."""

    def __init__(self, block_size: int, lookahead: int = 0):
        self.block_size, self.lookahead = block_size, lookahead
        self._num_flushes = 0

    def flush(self) -> None:
        """No request that comes now has a digest like one that was here, which may go on to fill blocks."""
        self._num_flushes += 1

    def num_full(self, num_tokens: int) -> int:
        """Blocks whose digest takes no more than the first `num_tokens` tokens."""
        return max(num_tokens - self.lookahead, 0) // self.block_size

    def of(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` digests. The tokens that they take must be known to the host."""
        digests = request.block_digests
        while len(digests) < count:
            start = len(digests) * self.block_size
            tokens = request.token_ids(start, start + self.block_size + self.lookahead)
            parent = digests[-1] if digests else _root(request.params.cache_salt, self._num_flushes)
            digests.append(hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest())
        return digests


def _root(salt: str | None, num_flushes: int) -> bytes:
    text = num_flushes.to_bytes(8) + (b"" if salt is None else salt.encode("utf-8", "surrogatepass"))
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"no salt" if salt is None else b"salt").digest()
