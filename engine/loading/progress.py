"""How far a start has come, over all ranks: its phase, bytes of weights, the rate and the time that is left.

Each rank counts its own bytes. Ranks other than 0 leave theirs in the store that the ranks share, a few times a second,
where rank 0 looks them up.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engine.errors import EngineDeadError

CHECKING, SUMS, STARTING = "checking files", "verifying checksums", "starting ranks"
READING, PREPARING, MEASURING, READY = "reading weights", "writing prepared weights", "measuring", "ready"
REPORT_SECONDS, MEETING_SECONDS = 0.25, 0.05
BEHIND, STILL_SECONDS = 0.1, 5.0
"""A rank is behind that lacks so much of its share more than all do of theirs, or has read nothing for so long."""
_KEY = "turnout/load"


class Store(Protocol):
    """What is used of torch's stores; `clone` is another connection to the same."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def clone(self) -> Store: ...


class Share(NamedTuple):
    """Of one rank, in bytes; total is 0 until it is known."""

    done: int = 0
    total: int = 0

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 0.0


@dataclass(frozen=True)
class Snapshot:
    """seconds: since the first byte was asked for, until the last came. still: of each rank, seconds without a byte."""

    phase: str
    shares: tuple[Share, ...]
    seconds: float
    still: tuple[float, ...]

    @property
    def done(self) -> int:
        return sum(share.done for share in self.shares)

    @property
    def total(self) -> int:
        """Bytes of all ranks; one that has not said yet counts as the others do on average."""
        known = [share.total for share in self.shares if share.total]
        return sum(known) * len(self.shares) // len(known) if known else 0

    @property
    def is_complete(self) -> bool:
        return all(share.total and share.done >= share.total for share in self.shares)

    @property
    def percent(self) -> int:
        return 100 * self.done // self.total if self.total else 0

    @property
    def rate(self) -> float:
        """Bytes a second of all ranks together."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Of the rank that will be last, as fast as it has been; None while that cannot be known."""
        least = min(share.fraction for share in self.shares)
        return self.seconds * (1 / least - 1) if least else None

    @property
    def behind(self) -> int | None:
        """The rank that has the least of its share, if the others wait for it, or if it stands still."""
        left = [rank for rank, share in enumerate(self.shares) if not share.total or share.done < share.total]
        if not left or not self.total:
            return None
        rank = min(left, key=lambda r: self.shares[r].fraction)
        lags = self.done / self.total - self.shares[rank].fraction >= BEHIND
        return rank if lags or self.still[rank] >= STILL_SECONDS else None

    def words(self) -> str:
        """`5.00 of 10.00 GB (50 %), 1.00 GB/s, 5 s left` and who is behind."""
        left = "?" if self.seconds_left is None else f"{self.seconds_left:.0f}"
        text = f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB{_of(len(self.shares))} ({self.percent} %), "
        text += f"{self.rate / 1e9:.2f} GB/s, {left} s left"
        if self.behind is None:
            return text
        still = self.still[self.behind]
        how = f"has read nothing for {still:.0f} s" if still >= STILL_SECONDS else "is behind"
        return f"{text}; rank {self.behind} {how}, at {100 * self.shares[self.behind].fraction:.0f} %"

    def summary(self) -> str:
        """Of a load that is complete."""
        size = f"{self.done / 1e9:.2f} GB{_of(len(self.shares))}"
        return f"{size} in {self.seconds:.1f} s, {self.rate / 1e9:.2f} GB/s"

    def as_dict(self) -> dict[str, Any]:
        """For /health."""
        left = self.seconds_left
        return {
            "phase": self.phase,
            "bytes_done": self.done,
            "bytes_total": self.total,
            "percent": self.percent,
            "gb_per_second": round(self.rate / 1e9, 3),
            "seconds_left": None if left is None else round(left, 1),
            "rank_behind": self.behind,
        }


def _of(num_ranks: int) -> str:
    return f" of {num_ranks} ranks" if num_ranks > 1 else ""


class LoadProgress:
    """This rank's count, and on rank 0 what the others have said of theirs. `add` is for one
    thread at a time; `poll` and `snapshot` may be another's."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.phase = CHECKING
        self._clock, self._rank, self._store = clock, 0, None
        self._seen = [(Share(), clock())]  # of each rank, with the time of its last change
        self._began: float | None = None
        self._reported = clock()
        self._polling = threading.Lock()
        self.num_meetings = 0  # that this rank has come to
        self._failure: Callable[[], str | None] = lambda: None

    def join(
        self, rank: int, world_size: int, store: Store | None, failure: Callable[[], str | None] = lambda: None
    ) -> None:
        """The ranks are there; counts begin anew, before any weight is read. store: None for a rank alone. failure:
        why a rank will not be heard of again."""
        self._failure = failure
        self._rank, self._seen = rank, [(Share(), self._clock())] * world_size
        self._began = None
        self._store = None if store is None or world_size == 1 else store.clone()

    def enter(self, phase: str) -> None:
        self.phase = phase

    def expect(self, num_bytes: int, phase: str = READING) -> None:
        """This rank is about to read so many bytes, beside those that it has said before."""
        self.phase = phase
        self._began = self._clock() if self._began is None else self._began
        self._note(self._rank, Share(self._share.done, self._share.total + num_bytes))
        self._report()
        self._reported = -math.inf  # the first bytes are told at once: no others may come for long

    def add(self, num_bytes: int) -> None:
        self._note(self._rank, Share(self._share.done + num_bytes, self._share.total))
        if self._clock() - self._reported >= REPORT_SECONDS or self._share.fraction >= 1:
            self._report()

    def poll(self) -> None:
        """Rank 0 looks up what the others have said; by more than one thread."""
        store = self._store
        with self._polling:
            for rank in range(len(self._seen)) if store is not None else ():
                key = f"{_KEY}/{rank}"
                if rank != self._rank and store.check([key]):
                    self._note(rank, Share(*map(int, store.get(key).split())))

    def polled(self) -> list[Share]:
        """`shares` after a look, or what was known before the store ended."""
        with suppress(RuntimeError):  # torch's: with the ranks, of which somebody else hears
            self.poll()
        return self.shares

    def meet(self, moment: str) -> None:
        """Waits until every rank has come to this moment, each of which comes once, however long reading takes until
        then: a collective would end by the process group's timeout. Raises EngineDeadError once one has failed."""
        self.num_meetings += 1
        if self._store is not None:
            meet(self._store, f"{_KEY}/{moment}", self._rank, len(self._seen), self._failure)

    @property
    def shares(self) -> list[Share]:
        """Of each rank, as far as it is known."""
        return [share for share, _ in self._seen]

    def snapshot(self) -> Snapshot:
        shares, moved = zip(*self._seen, strict=True)
        now = self._clock()
        shot = Snapshot(self.phase, shares, 0.0, tuple(now - then for then in moved))
        until = max(moved) if shot.is_complete else now
        seconds = 0.0 if self._began is None else max(until - self._began, 0.0)
        return Snapshot(shot.phase, shot.shares, seconds, shot.still)

    def leave(self) -> None:
        """Nothing is looked up any more, since the store may end with the ranks."""
        self._store = None

    @property
    def _share(self) -> Share:
        return self._seen[self._rank][0]

    def _note(self, rank: int, share: Share) -> None:
        if share != self._seen[rank][0]:
            self._seen[rank] = share, self._clock()

    def _report(self) -> None:
        self._reported = self._clock()
        if self._store is not None and self._rank:
            self._store.set(f"{_KEY}/{self._rank}", "{} {}".format(*self._share))


def meet(store: Store, key: str, rank: int, num_ranks: int, failure: Callable[[], str | None]) -> None:
    """Waits without a limit until every rank is here. Raises EngineDeadError once `failure` says why one will not."""
    keys = [f"{key}/{one}" for one in range(num_ranks)]
    store.set(keys[rank], "1")
    while not store.check(keys):
        if (reason := failure()) is not None:
            raise EngineDeadError(reason)
        time.sleep(MEETING_SECONDS)
