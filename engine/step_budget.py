"""How many prompt tokens the next step may prefill beside requests that decode, so that it keeps within a bound.

Rank 0 alone decides, by its own clock. Without this, whoever streams waits for the whole chunk of another's prompt.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.prefill_costs import PrefillCosts, StepLoad
from engine.scheduler import MANY_PREFILLS, GuessPlan, ScheduledRequest, Scheduler, SchedulerOutput
from engine.stats import StepBudgetSnapshot

FIRST_TOKENS = 16  # of the first step, of which nothing is known; a tile of rows is no dearer than one row
_AIM = 0.95  # of the bound: noise goes both ways
_GROWTH = 2  # at most, over what was measured
_FEW_TOKENS = 4  # cost about what one costs
_LEAST_GROWTH = 1.25  # if what was measured leaves room for it: a block more, where chunks end with blocks
_FEW_PAIRS = 2.0**18  # of tokens, whose attention takes no time to speak of
_UNMEETABLE = 1.1  # where even one token is too much: so many times the step of one token, or prompts would starve
_LITTLE_WAIT = 0.05  # of the time between two reads: the host came late to the second, and the device waited for it
_MOST_OUTSIDE = 0.2  # of the time between two steps, in which the caller did other things


class Prompt(NamedTuple):
    """One to be prefilled: tokens computed before, as many at most, and those left."""

    context: int
    remaining: int
    rank: tuple[int, int] = (0, 0)


class StepTimer:
    """Seconds between the reads of consecutive steps whose tokens were waited for.

    A step may have been launched before the one ahead of it was read, so that only the reads tell how long it took. A
    step that samples nothing is not waited for: neither its time nor that of the next one is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._read: float | None = None
        self._left: float | None = None
        self._outside = 0.0

    def enter(self) -> None:
        """The caller wants a step."""
        if self._left is not None:
            self._outside += self._clock() - self._left
        self._left = None

    def leave(self, output: SchedulerOutput) -> float | None:
        """What was read of it, if anything -> its seconds, if they can be told."""
        now = self._left = self._clock()
        if not output.scheduled:
            return None
        last, outside = self._read, self._outside
        waited = any(item.samples for item in output.scheduled)
        self._read, self._outside = now if waited else None, 0.0
        if last is None or not waited or outside > _MOST_OUTSIDE * (now - last):
            return None
        return now - last

    def pause(self) -> None:
        """Nothing runs: the time until the next step is not its own."""
        self._read = self._left = None
        self._outside = 0.0


class StepBudget:
    """Called once a step: `limit` before it, `observe` with the step that was read then. seconds: the bound.

    seeds: (tokens, context, seconds) of steps measured at start. most_absorbed: tokens of a chunk whose attention takes
    the cache as it is, as an attention backend's max_absorbed_query_len.
    """

    def __init__(
        self,
        seconds: float,
        max_num_batched_tokens: int,
        seeds: Iterable[tuple[int, int, float]] = (),
        most_absorbed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.seconds = seconds
        self._most_absorbed = most_absorbed
        self._max_num_batched_tokens = max_num_batched_tokens
        self._timer = StepTimer(clock)
        self._costs = PrefillCosts()
        self._costs.seed((StepLoad.of([(at, n)], 0, 0, most_absorbed), cost) for n, at, cost in seeds)
        self._shown = StepBudgetSnapshot(None, 0.0, 0.0)
        self._launching: float | None = None

    def limit(self, scheduler: Scheduler, plan: GuessPlan) -> int | None:
        """At least 1; None where nothing prefills beside requests that decode."""
        self._timer.enter()
        prompts, rows, kv_tokens = [], 0, 0
        for request in scheduler.running:
            remaining = request.num_tokens - request.num_computed_tokens
            if remaining > 1:
                prompts.append(Prompt(request.num_computed_tokens, remaining, request.rank_in_line))
            elif remaining == 1 and not request.ends_in_flight:
                rows += 1 + plan.num_verify
                kv_tokens += request.num_computed_tokens
        if rows and scheduler.waiting:
            prompts += self._arriving(scheduler, prompts)
        limit = self._choose(_in_turn(prompts), rows, kv_tokens) if rows and prompts else None
        self._shown = self._shown._replace(limit_tokens=limit)
        return limit

    def _arriving(self, scheduler: Scheduler, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those that the scheduler may admit now. How much of them it finds computed shows only then: all of it, to be
        on the safe side, so that their chunk of this one step may be smaller than it need be. One that must wait for
        blocks may wait for long, so it counts for nothing, and neither do those behind it."""
        found: list[Prompt] = []
        wanted = sum(prompt.remaining for prompt in prompts)
        for request in scheduler.waiting[:MANY_PREFILLS]:
            enough = wanted >= self._max_num_batched_tokens and len(prompts) + len(found) >= MANY_PREFILLS
            if enough or len(scheduler.running) + len(found) >= scheduler.max_num_seqs:
                break
            if not scheduler.kv_cache.has_room(request):
                break
            wanted += request.num_tokens
            context = request.num_tokens if scheduler.kv_cache.enable_prefix_caching else 0
            found.append(Prompt(context, request.num_tokens, request.rank_in_line))
        return found

    def _choose(self, prompts: list[Prompt], rows: int, kv_tokens: int) -> int:
        """The most tokens whose step is expected within the bound."""
        costs = self._costs
        if not costs.is_measured:
            return FIRST_TOKENS

        def load(tokens: int) -> StepLoad:
            return StepLoad.of(_shares(prompts, tokens), rows, kv_tokens, self._most_absorbed)

        known = max(costs.most_tokens, 1)
        fewest = costs.least_tokens if costs.least_tokens > _FEW_TOKENS else 1  # what fewer cost is not known then
        seconds = max(_AIM * self.seconds, _UNMEETABLE * costs.predict(load(fewest)) / fewest)
        most_pairs = max(_GROWTH * costs.most_pairs, _FEW_PAIRS)
        # Nothing costs more than in proportion: twice of what was measured takes twice as long at most.
        growth = min(max(seconds / costs.predict(load(known)), _LEAST_GROWTH), _GROWTH)
        most_short = self._most_absorbed or self._max_num_batched_tokens
        most = min(int(growth * known), max(self._max_num_batched_tokens - rows, 1))

        def fits(tokens: int) -> bool:
            # A chunk that expands its context may cost less than a shorter one that does not, to which the scheduler
            # may cut it: where blocks end.
            loads = [load(tokens)] if tokens <= most_short else [load(tokens), load(most_short)]
            return loads[0].pairs <= most_pairs and all(costs.predict(one) <= seconds for one in loads)

        limit = _largest(min(most, sum(prompt.remaining for prompt in prompts)), fits)
        self._shown = self._shown._replace(predicted_seconds=costs.predict(load(limit)))
        return limit

    def observe(self, output: SchedulerOutput, ahead: SchedulerOutput | None = None, waited: float = 0.0) -> None:
        """A step that was read just now, or an empty one while the next is in flight. ahead: the step that was launched
        before that read and is still in flight, None if there is none; waited: seconds that the read took.

        Where a read hardly waits, the time since the one before is what the host took to launch the next step, and that
        step's cost; the device may have done a part of it meanwhile, so that the time to its own read is too short. The
        longer of both is what those who wait for tokens see."""
        seconds = self._timer.leave(output)
        launching, self._launching = self._launching, None
        if seconds is None:
            return
        if ahead is not None and waited < _LITTLE_WAIT * seconds:
            self._launching = seconds
            if launching is None:
                return
        seconds = max(seconds, launching or 0.0)
        if any(map(_is_chunk, output.scheduled)):
            self._costs.add(load_of(output, self._most_absorbed), seconds)
            self._shown = self._shown._replace(observed_seconds=seconds)

    def pause(self) -> None:
        self._timer.pause()
        self._launching = None

    def snapshot(self) -> StepBudgetSnapshot:
        return self._shown


def load_of(output: SchedulerOutput, most_absorbed: int | None = None) -> StepLoad:
    """What a step computes; a prompt's single last token is like one of an answer."""
    chunks = [(item.start, item.num_tokens) for item in output.scheduled if _is_chunk(item)]
    decodes = [item for item in output.scheduled if not _is_chunk(item)]
    rows, kv_tokens = sum(item.num_rows for item in decodes), sum(item.start for item in decodes)
    return StepLoad.of(chunks, rows, kv_tokens, most_absorbed)


def _is_chunk(item: ScheduledRequest) -> bool:
    return item.num_tokens > 1 or not item.samples


def _in_turn(prompts: list[Prompt]) -> list[Prompt]:
    """As the scheduler serves them: the first in line, then the shortest."""
    if len(prompts) < 2:
        return prompts
    first, *others = sorted(prompts, key=operator.attrgetter("rank"))
    return [first, *sorted(others, key=operator.attrgetter("remaining"))]


def _shares(prompts: Sequence[Prompt], tokens: int) -> list[tuple[int, int]]:
    """(context, tokens) of each prompt as the scheduler shares them: half for the first, if others need the rest."""
    first, *others = prompts
    kept = min(tokens // 2, sum(prompt.remaining for prompt in others))
    share = min(tokens - kept, first.remaining)
    shares, left = [(first.context, share)], tokens - share
    for prompt in others:
        share = min(prompt.remaining, left)
        left -= share
        if share:
            shares.append((prompt.context, share))
    return shares


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, 1 if none does; all below one that fits do."""
    low, high = 1, max(most, 1)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
