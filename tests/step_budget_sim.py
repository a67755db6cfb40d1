"""Streams that decode while long prompts are prefilled, on a made-up machine: the real scheduler and step budget, a
clock that is told, and what every step took."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.kv_cache import KVCacheManager
from engine.prefill_costs import StepLoad
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import NO_GUESSES, Scheduler, SchedulerOutput
from engine.step_budget import StepBudget, load_of

Cost = Callable[[StepLoad], float]
BLOCK = 64


def linear(load: StepLoad) -> float:
    return 0.004 + 30e-6 * (load.tokens + load.rows)


def sparse(load: StepLoad) -> float:
    """A step of few rows reads few experts; from some 300 rows on the products take longer than the weights."""
    rows = load.tokens + load.rows
    weights = 0.004 + 0.016 * (1 - (1 - 8 / 384) ** rows)
    return max(weights, 0.004 + 31e-6 * rows) + 15e-9 * load.kv_tokens


def attending(load: StepLoad) -> float:
    """As `sparse`, and attention that takes most of the time at 100k tokens of context."""
    return sparse(load) + 2e-9 * load.pairs


def expanding(load: StepLoad) -> float:
    """As `sparse`, and chunks of more than 16 tokens expand their context first: 25 ms of it at 100k tokens."""
    return sparse(load) + 1e-9 * load.pairs + 250e-9 * load.expanded


def tiled(load: StepLoad) -> float:
    """Rows cost in whole tiles of 128."""
    return attending(load._replace(tokens=-(-load.tokens // 128) * 128))


@dataclass
class Machine:
    """noise: relative, of one sigma. hiccups: the chance that a step takes five times as long. slow: by step number."""

    cost: Cost
    noise: float = 0.0
    hiccups: float = 0.0
    slow: Callable[[int], float] = lambda number: 1.0
    seed: int = 0
    number: int = 0
    is_hiccup: bool = False
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def seconds(self, load: StepLoad) -> float:
        self.number += 1
        factor = max(1 + self.noise * self.rng.gauss(0, 1), 0.5) * self.slow(self.number)
        self.is_hiccup = self.rng.random() < self.hiccups
        return self.cost(load) * factor * (5 if self.is_hiccup else 1)


@dataclass
class Step:
    """seconds: between its read and that of the step before."""

    load: StepLoad
    seconds: float
    is_hiccup: bool


class World:
    """overlap: each step is launched before the one ahead of it is read. caching: all prompts begin alike. host: what
    launching a step takes, in which the device begins with it."""

    def __init__(
        self,
        machine: Machine,
        bound: float = 0.050,
        max_num_batched_tokens: int = 2048,
        overlap: bool = True,
        seeds: Sequence[tuple[int, int, float]] = (),
        caching: bool = False,
        most_absorbed: int | None = None,
        host: Cost = lambda load: 0.0,
    ):
        self.machine, self.overlap, self.most_absorbed = machine, overlap, most_absorbed
        self.now = self._device_free = self._waited = 0.0
        self.host = host
        self.scheduler = Scheduler(KVCacheManager(16000, BLOCK, caching), 64, max_num_batched_tokens)
        self.budget = StepBudget(bound, max_num_batched_tokens, seeds, most_absorbed, lambda: self.now)
        self.steps: list[Step] = []
        self._in_flight: deque[tuple[SchedulerOutput, float, bool]] = deque()
        self._last_read = 0.0

    def add(self, name: str, prompt_len: int, max_tokens: int = 10**5) -> Request:
        request = Request(name, [1] * prompt_len, SamplingParams(), 0, max_tokens)
        self.scheduler.add(request)
        return request

    def stream(self, count: int, context: int = 4000) -> None:
        """Requests that decode from now on."""
        started = [self.add(f"stream {len(self.steps)} {i}", context, 20_000) for i in range(count)]
        while not all(request.output_token_ids for request in started):
            self.step()

    def prefill(self, *prompt_lens: int) -> list[Step]:
        """The steps until all of these prompts have their first token."""
        first = len(self.steps)
        requests = [self.add(f"prompt {first} {i}", length, 2) for i, length in enumerate(prompt_lens)]
        while not all(request.output_token_ids for request in requests):
            self.step()
        return self.steps[first:]

    def step(self) -> None:
        """As a core and its replica do it."""
        limit = self.budget.limit(self.scheduler, NO_GUESSES)
        output = self.scheduler.schedule(NO_GUESSES, limit)
        if output.scheduled:
            self.scheduler.launch(output)
            begun, self.now = max(self._device_free, self.now), self.now + self.host(self._load(output))
            self._device_free = max(begun + self.machine.seconds(self._load(output)), self.now)
            self._in_flight.append((output, self._device_free, self.machine.is_hiccup))
        read = SchedulerOutput()
        if len(self._in_flight) > (1 if self.overlap and output.scheduled else 0):
            read = self._read()
        self.budget.observe(read, output if self._in_flight else None, self._waited)

    def _load(self, output: SchedulerOutput) -> StepLoad:
        return load_of(output, self.most_absorbed)

    def _read(self) -> SchedulerOutput:
        output, done, is_hiccup = self._in_flight.popleft()
        if any(item.samples for item in output.scheduled):
            self._waited, self.now = max(done - self.now, 0.0), max(self.now, done)
        self.scheduler.update(output, [[5] for item in output.scheduled if item.samples])
        self.steps.append(Step(self._load(output), self.now - self._last_read, is_hiccup))
        self._last_read = self.now
        return output


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def beside(steps: Sequence[Step]) -> list[Step]:
    """Those that prefilled while others decoded."""
    return [step for step in steps if step.load.tokens and step.load.rows]


def rate(steps: Sequence[Step]) -> float:
    """Prompt tokens a second."""
    return sum(step.load.tokens for step in steps) / sum(step.seconds for step in steps)


def best_rate(world: World, rows: int, kv_tokens: int, prompt_len: int) -> float:
    """Of one who knows the costs and makes every step as long as the bound allows."""
    cost, bound, most = world.machine.cost, world.budget.seconds, world.scheduler.max_num_batched_tokens
    done, seconds = 0, 0.0
    while done < prompt_len:
        low, high = 1, min(most - rows, prompt_len - done)
        while low < high:
            middle = (low + high + 1) // 2
            load = StepLoad.of([(done, middle)], rows, kv_tokens, world.most_absorbed)
            low, high = (middle, high) if cost(load) <= bound else (low, middle - 1)
        seconds += cost(StepLoad.of([(done, low)], rows, kv_tokens, world.most_absorbed))
        done += low
    return prompt_len / seconds
