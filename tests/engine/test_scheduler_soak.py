"""Random traffic for so many steps, every invariant after each: a short run always, a million steps on demand
(`pytest -m slow tests/engine/test_scheduler_soak.py`)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.scheduler import GuessPlan
from tests.scheduler_model import ScheduledWorld

SALTS = (None, None, None, "tenant")


class Traffic:
    """One small engine after the other, each with its own sizes, load and habits."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def run(self, num_steps: int) -> None:
        while self.seen["steps"] < num_steps:
            self._one_world(min(num_steps - self.seen["steps"], 400))

    def _one_world(self, num_steps: int) -> None:
        rng = self.rng
        block_size = rng.choice([1, 2, 3, 4, 8])
        self.world = ScheduledWorld(
            num_blocks=rng.randint(2, 24),
            block_size=block_size,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice([1, 2, 5, 9, 16, 33]),
            replays=rng.random() < 0.7,
            lookahead=rng.randint(0, 1),
            caching=rng.random() < 0.85,
            host_blocks=rng.choice([0, 3, 50]),
        )
        load = rng.choice([0.05, 0.3, 1.0, 3.0])
        most_guesses = rng.choice([0, 1, 3, 7])
        for _ in range(num_steps):
            self._arrive_and_leave(load)
            plan = GuessPlan(rng.randint(0, most_guesses), rng.randint(0, most_guesses))
            self._step(plan, rng.random() < 0.7, rng.choice([None, None, 0, 1, 4]))
        self.world.drain(GuessPlan(most_guesses, most_guesses), ahead=True)
        self._count_ends()

    def _step(self, plan: GuessPlan, ahead: bool, prefill_limit: int | None) -> None:
        output = self.world.step(plan, ahead, prefill_limit)
        self.seen["steps"] += 1
        self.seen["tokens"] += output.num_tokens

    def _arrive_and_leave(self, load: float) -> None:
        rng, world = self.rng, self.world
        while len(world.scheduler.waiting) < 12 and rng.random() < load / (1 + load):
            prompt_len = rng.randint(1, min(world.max_tokens, 40))
            max_tokens = rng.randint(1, min(world.max_tokens - prompt_len + 1, 20))
            world.add(
                f"r{len(world.arrivals)}",
                prompt_len,
                max_tokens,
                shared=rng.choice([0, prompt_len, rng.randint(0, prompt_len)]),
                priority=rng.choice([0, 0, 0, 1, -1]),
                cache_salt=rng.choice(SALTS),
                prompt_logprobs=rng.choice([None] * 9 + [0]),
            )
        if world.scheduler.has_unfinished and rng.random() < 0.04:
            world.end(rng.choice(sorted(world.scheduler._requests)), rng.choice(["abort", "stop"]))
            self.seen["ended from outside"] += 1
        if rng.random() < 0.003:
            world.flush()
            self.seen["flushes"] += 1

    def _count_ends(self) -> None:
        scheduler = self.world.scheduler
        self.seen["requests"] += len(self.world.arrivals)
        self.seen["finished"] += len(self.world.finished)
        self.seen["preemptions"] += scheduler.num_preemptions
        self.seen["hit tokens"] += scheduler.kv_cache.hit_tokens
        self.seen["restored blocks"] += scheduler.kv_cache.host.num_restored
        self.seen["guesses accepted"] += self.world.side.device.num_accepted
        self.seen["steps ahead"] += self.world.ahead


def check(seen: Counter[str]) -> None:
    """Every request ended, one way or the other, and everything was tried."""
    assert seen["finished"] + seen["ended from outside"] == seen["requests"]
    tried = ("preemptions", "hit tokens", "guesses accepted", "steps ahead", "flushes", "ended from outside")
    tried += ("restored blocks",)
    assert all(seen[name] > seen["steps"] / 1000 for name in tried), seen


@pytest.mark.parametrize("seed", range(2))
def test_a_few_thousand_steps(seed):
    traffic = Traffic(seed)
    traffic.run(2000)
    check(traffic.seen)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_a_million_steps(seed):
    """In eight parts that run side by side."""
    traffic = Traffic(seed)
    traffic.run(125_000)
    print(dict(traffic.seen))
    check(traffic.seen)
