"""A made-up machine and draft on which a choice of the number of guesses is tried: no tensors, a clock that is told."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.acceptance import GuessOutcome
from engine.draft_choice import DraftChoice, Plan, StepOutcome

# Bytes of a step of width 1, 2, 3, 4, 5, 8 over those of width 1: 384 experts, 8 a token (by batch size).
SPARSE = {
    1: (1.0, 1.35, 1.70, 2.04, 2.37, 2.69, 3.01, 3.32),
    2: (1.0, 1.51, 1.99, 2.46, 2.90, 3.33, 3.73, 4.13),
    4: (1.0, 1.63, 2.21, 2.74, 3.23, 3.68, 4.09, 4.48),
    8: (1.0, 1.68, 2.26, 2.75, 3.16, 3.51, 3.80, 4.05),
    16: (1.0, 1.63, 2.08, 2.41, 2.64, 2.80, 2.92, 3.00),
    32: (1.0, 1.47, 1.72, 1.84, 1.90, 1.93, 1.95, 1.96),
    64: (1.0, 1.25, 1.31, 1.33, 1.33, 1.33, 1.33, 1.33),
}


@dataclass
class Machine:
    """ratios: verify step of k guesses over a plain one, by bucket. Making a guess takes `guess` plain steps."""

    ratios: dict[int, Sequence[float]]
    plain: float = 0.012
    guess: float = 0.06
    noise: float = 0.0
    hiccups: float = 0.0
    growth: float = 0.0  # of a plain step, a step

    def seconds(self, bucket: int, plan: Plan, step: int = 0) -> float:
        """As it is without noise."""
        ratio = self.ratios[bucket][plan.num_verify] + self.guess * plan.num_propose
        return (self.plain + self.growth * step) * ratio


@dataclass
class Run:
    seconds: float = 0.0
    tokens: int = 0
    plans: list[Plan] = field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def share(self, k: int, start: int = 0) -> float:
        plans = self.plans[start:]
        return sum(plan.num_verify == k for plan in plans) / len(plans)

    def counts(self) -> Counter:
        return Counter(plan.num_verify for plan in self.plans)


class Decoding:
    """Steps of a batch, each launched before the one ahead of it is read. rates(request id, step): chances of the
    guesses, each given that those before it were right."""

    def __init__(
        self, choice: DraftChoice, machine: Machine, rates: Callable[[str, int], Sequence[float]], seed: int = 0
    ):
        self.choice, self.machine, self.rates = choice, machine, rates
        self._random = random.Random(seed)
        self._step = 0
        self._guesses: dict[str, list[bool]] = {}
        self._before: Plan | None = None
        self._unread: StepOutcome | None = None

    def run(self, request_ids: Sequence[str], steps: int, beyond: frozenset[str] = frozenset()) -> Run:
        done = Run()
        for _ in range(steps):
            plan = self.choice.choose(request_ids, beyond)
            if self._unread is not None:
                self.choice.observe(self._unread)
            self._unread = self._execute(plan, request_ids, done)
            done.plans.append(plan)
        return done

    def _execute(self, plan: Plan, request_ids: Sequence[str], done: Run) -> StepOutcome:
        bucket = next(b for b in sorted(self.machine.ratios) if b >= len(request_ids))
        seconds = self.machine.seconds(bucket, plan, self._step)
        outcomes = [self._verify(request_id, plan) for request_id in request_ids]
        done.tokens += len(outcomes) + sum(outcome.accepted for outcome in outcomes)
        done.seconds += seconds
        is_steady = self._before is not None and plan[:2] == self._before[:2]
        self._before, self._step = plan, self._step + 1
        shown = self._clock(seconds) if is_steady else None
        return StepOutcome(len(request_ids), plan.num_verify, plan.num_propose, shown, outcomes)

    def _clock(self, seconds: float) -> float:
        seconds *= 1 + self.machine.noise * self._random.gauss(0, 1)
        return seconds * (10 if self._random.random() < self.machine.hiccups else 1)

    def _verify(self, request_id: str, plan: Plan) -> GuessOutcome:
        guesses = self._guesses.get(request_id, [])
        compared = min(plan.num_verify + 1, len(guesses))
        verified = min(plan.num_verify, len(guesses))
        matched = next((i for i, right in enumerate(guesses[:compared]) if not right), compared)
        rates = self.rates(request_id, self._step)
        self._guesses[request_id] = [self._random.random() < rates[i] for i in range(plan.num_propose)]
        return GuessOutcome(request_id, verified, min(matched, verified), compared, matched)


def best_speed(
    machine: Machine, num_requests: int, rates: Sequence[float], most: int, step: int = 0
) -> tuple[float, int]:
    """(tokens a second, guesses) of the best fixed number of guesses, where all requests have these rates."""
    bucket = next(b for b in sorted(machine.ratios) if b >= num_requests)
    found = []
    for k in range(most + 1):
        tokens, chance = 1.0, 1.0
        for rate in rates[:k]:
            chance *= rate
            tokens += chance
        found.append((num_requests * tokens / machine.seconds(bucket, Plan(k, k, "fixed"), step), k))
    return max(found)
