"""Sessions of agents, made from a seed, replayed on the engine's block pool and its cache on the host.

A simulation in whole blocks and seconds of its own. Prompts are computed one after another, in the order in which they
arrive; an answer takes its time beside them and holds the session's blocks. Then the session thinks, or its tool works.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.block_pool import BlockPool
from engine.cache_plan import BLOCK_SIZE
from engine.host_cache import HostCache

SECONDS_A_TOKEN = 0.015  # of an answer
PREFIXES = ((6000, 5), (12000, 3), (20000, 2))
"""System prompts with tool descriptions: (tokens, how many sessions of ten have it)."""


@dataclass(frozen=True)
class TraceShape:
    """num_sessions run at a time; about as many turns each."""

    num_sessions: int
    num_turns: int
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """new_tokens: of the prompt beyond what the turn before left; pause: seconds before it."""

    new_tokens: int
    answer_tokens: int
    pause: float


@dataclass
class Session:
    """Its context begins with `prefix_tokens` that all sessions of that prefix share."""

    name: int
    prefix: int
    prefix_tokens: int
    turns: list[Turn]

    def blocks(self, num_tokens: int) -> list[tuple[int, ...]]:
        """What its full blocks hold: of the common prefix, or its own."""
        shared = self.prefix_tokens // BLOCK_SIZE
        full = num_tokens // BLOCK_SIZE
        mine = [(1, self.name, index) for index in range(shared, full)]
        return [(0, self.prefix, index) for index in range(min(shared, full))] + mine


def make_sessions(shape: TraceShape) -> list[Session]:
    """Contexts that grow to 30 to 120 thousand tokens in `num_turns` turns, most tool outputs short, some long; pauses
    of seconds for tools, of minutes for people now and then."""
    draw = random.Random(shape.seed)
    sessions = []
    for name in range(shape.num_sessions):
        tokens = draw.choices([t for t, _ in PREFIXES], [w for _, w in PREFIXES])[0]
        count = max(draw.randint(shape.num_turns * 3 // 4, shape.num_turns * 5 // 4), 1)
        growth = draw.uniform(24_000, 100_000)
        weights = [draw.lognormvariate(0, 1) for _ in range(count)]
        turns = [_turn(draw, max(int(growth * weight / sum(weights)), 50)) for weight in weights]
        sessions.append(Session(name, tokens, tokens, turns))
    return sessions


def _turn(draw: random.Random, grown: int) -> Turn:
    answer = max(min(int(draw.lognormvariate(5.5, 0.7)), grown // 2), 20)
    pause = draw.uniform(60, 600) if draw.random() < 0.1 else draw.expovariate(1 / 5)
    return Turn(grown - answer, answer, pause)


@dataclass(frozen=True)
class HostCosts:
    """Seconds a token: computed, and brought back from the host."""

    compute: float
    restore: float


@dataclass
class Replay:
    """Tokens of prompts: all, found on the device, brought back, computed again though they had been before."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    again_tokens: int = 0
    ttft: list[float] = field(default_factory=list)

    @property
    def mean_ttft(self) -> float:
        return statistics.mean(self.ttft)

    @property
    def p90_ttft(self) -> float:
        return sorted(self.ttft)[int(0.9 * (len(self.ttft) - 1))]


def replay(sessions: Iterable[Session], num_blocks: int, host_blocks: int, costs: HostCosts) -> Replay:
    """Raises ValueError where one session's longest context does not fit the pool."""
    return _Simulation(num_blocks, host_blocks, costs).run(list(sessions))


class _Simulation:
    def __init__(self, num_blocks: int, host_blocks: int, costs: HostCosts):
        self.host = HostCache(host_blocks)
        self.pool = BlockPool(num_blocks + 1, self.host.save)
        self.costs, self.found = costs, Replay()
        self._seen: set[object] = set()
        self._events: list[tuple[float, int, str, object]] = []
        self._order = itertools.count()  # of events of one moment
        self._waiting: list[tuple[float, Session, int, int]] = []
        self._free_at = 0.0

    def run(self, sessions: list[Session]) -> Replay:
        for session in sessions:
            self._plan(session.turns[0].pause, "arrive", (session, 0, session.prefix_tokens))
        while self._events:
            now, _, kind, what = heapq.heappop(self._events)
            if kind == "arrive":
                self._waiting.append((now, *what))
            else:
                self.pool.give_back(what)
            while self._waiting and self._admit(now, *self._waiting[0]):
                del self._waiting[0]
        if self._waiting:
            raise ValueError(f"a context does not fit a pool of {self.pool.num_usable} blocks; take a larger one.")
        return self.found

    def _plan(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), kind, what))

    def _admit(self, now: float, arrived: float, session: Session, index: int, context: int) -> bool:
        """Begins a turn if there is room for its prompt and answer."""
        turn = session.turns[index]
        prompt = context + turn.new_tokens
        after = prompt + turn.answer_tokens
        keys = session.blocks(prompt)
        held = self._find(keys)
        missing = -(-after // BLOCK_SIZE) - len(held)
        if missing > self.pool.num_free - sum(map(self.pool.is_idle, held)):
            return False
        restored = len(self.host.find(keys[len(held) :]))
        self.pool.hold(held)
        blocks = held + self.pool.take(missing)
        self.host.take_copies()
        for block, key in zip(blocks, session.blocks(after), strict=False):
            self.pool.name(block, key)
        self._account(prompt, keys, len(held), restored)
        todo = prompt - (len(held) + restored) * BLOCK_SIZE
        begin = max(now, self._free_at)
        self._free_at = begin + todo * self.costs.compute + restored * BLOCK_SIZE * self.costs.restore
        self.found.ttft.append(self._free_at - arrived)
        end = self._free_at + turn.answer_tokens * SECONDS_A_TOKEN
        self._seen.update(session.blocks(after))
        self._plan(end, "end", blocks)
        if index + 1 < len(session.turns):
            self._plan(end + session.turns[index + 1].pause, "arrive", (session, index + 1, after))
        return True

    def _find(self, keys: list) -> list[int]:
        held = []
        for key in keys:
            block = self.pool.find(key)
            if block is None:
                break
            held.append(block)
        return held

    def _account(self, prompt: int, keys: list, num_held: int, num_restored: int) -> None:
        found, beyond = self.found, keys[num_held + num_restored :]
        found.prompt_tokens += prompt
        found.cached_tokens += num_held * BLOCK_SIZE
        found.restored_tokens += num_restored * BLOCK_SIZE
        found.again_tokens += sum(key in self._seen for key in beyond) * BLOCK_SIZE
