"""Past the page cache (O_DIRECT) or through it: what a disk is read faster by is found out while it is read.

Which of both wins depends on the disk, its driver and the processors: the page cache takes cores' time, for a copy and
for room in memory, and the kernel reads ahead of it, which O_DIRECT leaves to who reads.
"""

from __future__ import annotations

import threading
from collections import Counter

TRIAL_BYTES = 256 * 2**20  # of one way at a time
TRIALS = (True, False, False, True)  # past the page cache? the first and the last share a disk's moods
LEAST_BYTES = 16 * TRIAL_BYTES  # of all reads; for fewer a trial costs more than it finds


class ReadWay:
    """Tells for each read which way to go: four trials by turns, then the way that took less time a byte.

    total_bytes: of all reads to come; few of them go past the page cache, without a trial. Safe to use from several
    threads.
    """

    def __init__(self, total_bytes: int):
        self._lock = threading.Lock()
        self._planned = 0 if total_bytes >= LEAST_BYTES else len(TRIALS) * TRIAL_BYTES
        self._bytes: Counter[bool] = Counter()
        self._seconds: Counter[bool] = Counter()

    def is_direct(self, size: int) -> bool:
        """Whether the next `size` bytes are to be read past the page cache."""
        with self._lock:
            trial = self._planned // TRIAL_BYTES
            self._planned += size
            return TRIALS[trial] if trial < len(TRIALS) else self.direct_is_faster

    def tell(self, is_direct: bool, size: int, seconds: float) -> None:
        """seconds: that a thread took to read `size` bytes that were not cached, others reading beside it."""
        with self._lock:
            self._bytes[is_direct] += size
            self._seconds[is_direct] += seconds

    @property
    def direct_is_faster(self) -> bool:
        """By what was told so far; True where that is not of both."""
        return self._seconds[True] * self._bytes[False] <= self._seconds[False] * self._bytes[True]
