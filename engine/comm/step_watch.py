"""Where every rank is in the present step, and when that means that one of them hangs or has gone its own way.

Nothing here waits or talks: rank 0's step and the thread that reads the other ranks' words report what they see, with
a clock that a test may replace. A step is work without an end only if no rank moves: each collective that any rank
enters starts the time anew, so a long step is no hang. While weights are loaded each byte does, for a slow disk is no
hang either; a rank that reads none for long is at fault although others read. Between steps nothing is watched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

START = 0
"""The number of the "step" in which an engine is built: it may take long, but no process may fall silent."""
SILENT_START_SECONDS = 120.0  # reading a large tensor from a slow disk holds the interpreter
STILL_LOAD_SECONDS = 300.0
"""A rank that is at its weights has read none for so long: longer than a disk or a network file system recovers in."""
_SILENT_SHARE = 0.4
LEAST_SILENCE_SECONDS = 3.0


class Patience(NamedTuple):
    """Seconds without any progress, within a step or while the engine is built, that make a hang."""

    step: float = 20.0
    start: float = 480.0

    @property
    def load(self) -> float:
        return min(STILL_LOAD_SECONDS, self.start)

    @property
    def silence(self) -> float:
        """Seconds within a step after which a process that answers nothing at all is taken as stopped; it is asked
        every second."""
        return max(_SILENT_SHARE * self.step, LEAST_SILENCE_SECONDS)


DEFAULT_PATIENCE = Patience()


class StepDigest(NamedTuple):
    """What ranks that agree have in common at a step: requests and tokens it launched, a checksum of tokens it read."""

    num_requests: int
    num_tokens: int
    checksum: int


@dataclass(frozen=True)
class Verdict:
    """Why the engine must stop, and the ranks that will not end by themselves."""

    reason: str
    ranks: tuple[int, ...]


@dataclass
class _Rank:
    """done: the last step it has finished. position: (step, collectives entered). heard: when it last said a word.
    load: bytes of weights that it has read, of how many (0: not known yet). moved: when position or load changed."""

    done: int = START - 1
    position: tuple[int, float] = (START, 0)
    heard: float = 0.0
    load: tuple[int, int] = (0, 0)
    moved: float = 0.0
    is_away: bool = False


class StepWatch:
    """Rank 0's knowledge of all ranks; any thread may call it."""

    def __init__(
        self, world_size: int, patience: Patience = DEFAULT_PATIENCE, clock: Callable[[], float] = time.monotonic
    ):
        self._patience = patience
        self._clock = clock
        self._lock = threading.Lock()
        self._ranks = [_Rank() for _ in range(world_size)]
        self._step = START - 1
        self._progress = 0.0
        self._digests: dict[int, dict[int, StepDigest]] = {}
        self._disagreement: Verdict | None = None

    def began(self, step: int) -> None:
        """Rank 0 tells the others to take `step`."""
        with self._lock:
            if not self._is_busy():
                for rank in self._ranks:
                    rank.heard = rank.moved = self._clock()
            self._step = step
            self._ranks[0].position = (step, 0)
            self._progress = self._clock()

    def finished(self, rank: int, step: int, digest: StepDigest | None = None) -> None:
        with self._lock:
            self._ranks[rank].done = step
            self._ranks[rank].heard = self._progress = self._clock()
            if digest is not None:
                self._compare(rank, step, digest)

    def heard(self, rank: int, position: tuple[int, float] | None) -> None:
        """A rank says that its process runs, and where its step is; None: its program has not come to the step."""
        with self._lock:
            state = self._ranks[rank]
            state.heard, state.is_away = self._clock(), position is None
            if position is not None and position != state.position:
                state.position = position
                self._move(state)

    def loaded(self, loads: Iterable[tuple[int, int]]) -> None:
        """How far each rank's weights are, in rank order; as of `_Rank.load`."""
        with self._lock:
            for state, load in zip(self._ranks, loads, strict=True):
                if load != state.load:
                    state.load = load
                    self._move(state)

    def _move(self, state: _Rank) -> None:
        state.moved = self._progress = self._clock()

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return self._is_busy()

    def is_in_step(self, rank: int = 0) -> bool:
        with self._lock:
            return self._ranks[rank].done < self._step

    def verdict(self) -> Verdict | None:
        with self._lock:
            if self._disagreement is not None or not self._is_busy():
                return self._disagreement
            return self._silence() or self._still_load() or self._hang()

    def _is_busy(self) -> bool:
        return any(rank.done < self._step for rank in self._ranks)

    def _silence(self) -> Verdict | None:
        allowed = SILENT_START_SECONDS if self._step == START else self._patience.silence
        now = self._clock()
        others = [(r, rank) for r, rank in enumerate(self._ranks) if r and not rank.is_away]
        ranks = tuple(r for r, rank in others if now - rank.heard > allowed)
        if not ranks:
            return None
        return Verdict(f"{_name(ranks, 'does', 'do')} not respond in {self._where(ranks[0])}.", ranks)

    def _still_load(self) -> Verdict | None:
        """Names the ranks that should read and do not. One that has entered more collectives than another waits for it
        there, and one that has all of its share waits for the others."""
        if self._step != START:
            return None
        late = {r: rank for r, rank in enumerate(self._ranks) if rank.done < START}
        late = {r: rank for r, rank in late.items() if rank.load[0] < rank.load[1]}
        least = min((rank.position for rank in late.values()), default=None)
        since = self._clock() - self._patience.load
        still = {r: rank.load for r, rank in late.items() if rank.position == least and rank.moved < since}
        if not still:
            return None
        ranks = tuple(still)
        places = ", ".join(f"{done / 1e9:.2f} of {total / 1e9:.2f}" for done, total in still.values())
        what = f"read nothing for {self._patience.load:g} s while reading weights, at {places} GB"
        return Verdict(f"{_name(ranks, 'has', 'have')} {what}; look at the disk that holds them.", ranks)

    def _hang(self) -> Verdict | None:
        """Names whom the others wait for: of the ranks that are not done, those that have come least far."""
        allowed = self._patience.start if self._step == START else self._patience.step
        if any(rank.is_away for rank in self._ranks) or self._clock() - self._progress <= allowed:
            return None
        late = [r for r, rank in enumerate(self._ranks) if rank.done < self._step]
        least = min(self._ranks[r].position for r in late)
        ranks = tuple(r for r in late if self._ranks[r].position == least)
        return Verdict(f"{_name(ranks, 'hangs', 'hang')} in {self._where(ranks[0])} for {allowed:g} s.", ranks)

    def _where(self, rank: int) -> str:
        step = min(self._ranks[rank].done + 1, self._step)
        return "the start" if step == START else f"step {step}"

    def _compare(self, rank: int, step: int, digest: StepDigest) -> None:
        known = self._digests.setdefault(step, {})
        known[rank] = digest
        for other, theirs in known.items() if rank == 0 else [(rank, digest)]:
            ours = known.get(0, theirs)
            if theirs != ours and self._disagreement is None:
                reason = f"rank {other} disagrees at step {step}: {_difference(theirs, ours)}."
                self._disagreement = Verdict(reason, ())
        if len(known) == len(self._ranks):
            del self._digests[step]


def _name(ranks: tuple[int, ...], singular: str, plural: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {singular}"
    return f"ranks {', '.join(map(str, ranks))} {plural}"


def _difference(theirs: StepDigest, ours: StepDigest) -> str:
    if theirs.num_requests != ours.num_requests:
        return f"it scheduled {theirs.num_requests} requests, rank 0 {ours.num_requests}"
    if theirs.num_tokens != ours.num_tokens:
        return f"it scheduled {theirs.num_tokens} tokens, rank 0 {ours.num_tokens}"
    return "it sampled other tokens than rank 0"
