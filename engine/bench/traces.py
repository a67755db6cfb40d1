"""Sessions of requests made from a seed: the load that `engine.bench serve` puts on an engine.

Token ids are random, so that nothing is shared but what a trace says is shared.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

SYSTEM_TOKENS = (500, 7_500)
TOOL_LIST_TOKENS = (9_000, 17_000)
TASK_TOKENS = 120
APPENDED_MEDIAN, APPENDED_SIGMA, APPENDED_MOST = 450, 1.6, 30_000
ANSWER_MEDIAN, ANSWER_SIGMA, ANSWER_MOST = 160, 1.0, 4_000
THINK_MEDIAN, THINK_SIGMA, THINK_MOST = 0.8, 1.5, 60.0
_LEAST_TURNS = 3


@dataclass(frozen=True)
class Turn:
    """`new_ids` come behind all prompts and answers of the session so far; the request follows `think_seconds` after
    the answer before. The answer has exactly `max_tokens` tokens."""

    new_ids: list[int]
    max_tokens: int
    think_seconds: float = 0.0


@dataclass(frozen=True)
class Session:
    turns: list[Turn]

    @property
    def num_tokens(self) -> int:
        """The context behind the last answer."""
        return sum(len(turn.new_ids) + turn.max_tokens for turn in self.turns)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Session:
        return cls([Turn(**turn) for turn in data["turns"]])


def fixed(count: int, prompt: int, output: int, vocabulary: int, seed: int) -> list[Session]:
    """`count` requests of `prompt` tokens that nothing shares, answered with `output` tokens."""
    return shared_prefix(count, prompt, output, 0.0, 1, vocabulary, seed)


def shared_prefix(
    count: int, prompt: int, output: int, share: float, groups: int, vocabulary: int, seed: int
) -> list[Session]:
    """As `fixed`, but requests i, i + groups, i + 2 groups ... begin with the same `share` (0 to 1) of the prompt."""
    rng = random.Random(f"shared {seed}")
    num_shared = round(prompt * share)
    prefixes = [_ids(rng, num_shared, vocabulary) for _ in range(groups)]
    rests = [_ids(rng, prompt - num_shared, vocabulary) for _ in range(count)]
    return [Session([Turn(prefixes[i % groups] + rest, output)]) for i, rest in enumerate(rests)]


def agents(
    count: int, turns: int, scale: float, longest: int, vocabulary: int, seed: int, think: float = 1.0
) -> list[Session]:
    """`count` sessions of about `turns` turns of coding agents; none grows beyond `longest` tokens.

    All begin with the same tool list, each with its own of two system prompts. A turn appends a tool's output and asks
    for a short answer; now and then it is the user's next task. `scale` shortens every length, `think` every wait.

    Lengths follow what is public of such traces. The 2026-04 traces of Claude Code that SemiAnalysis publishes
    (cc-traces-weka) have system prompts of 498 to 7,460 tokens, tool lists of 890 to 17,300 (mostly 12,400 to 13,000)
    and answers mostly of 150 to 250. TraceLab (University of Washington, arXiv 2606.30560) counts 4,265 sessions with
    357,161 model calls (84 a session), 154,000 tokens of context a call, 96 % of them read from a cache, 523 tokens
    answered, and lengths and times of tool calls with heavy tails. Medians and tails here are log-normal fits by eye
    to such figures, not to the traces themselves; sessions are shorter.
    """
    rng = random.Random(f"agents {seed}")
    tool_list = _ids(rng, _scaled(rng.randint(*TOOL_LIST_TOKENS), scale), vocabulary)
    systems = [_ids(rng, _scaled(rng.randint(*SYSTEM_TOKENS), scale), vocabulary) for _ in range(2)]
    return [
        _agent(rng, tool_list + systems[i % len(systems)], turns, scale, longest, vocabulary, think)
        for i in range(count)
    ]


def _agent(
    rng: random.Random, prefix: list[int], turns: int, scale: float, longest: int, vocabulary: int, think: float
) -> Session:
    """At least one turn, which the caller has to leave room for."""
    wanted = max(_LEAST_TURNS, round(rng.expovariate(1 / turns)))
    made: list[Turn] = []
    used = 0
    for number in range(min(wanted, 4 * turns)):
        appended = _scaled(_log_normal(rng, APPENDED_MEDIAN, APPENDED_SIGMA, APPENDED_MOST), scale)
        new = [*prefix, *_ids(rng, _scaled(TASK_TOKENS, scale), vocabulary)] if number == 0 else None
        new = new or _ids(rng, appended, vocabulary)
        answer = _scaled(_log_normal(rng, ANSWER_MEDIAN, ANSWER_SIGMA, ANSWER_MOST), scale)
        wait = _log_normal(rng, THINK_MEDIAN, THINK_SIGMA, THINK_MOST) * think if number else 0.0
        if used + len(new) + answer > longest:
            break
        used += len(new) + answer
        made.append(Turn(new, answer, wait))
    return Session(made)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` sessions arrive, `rate` a second: a Poisson process."""
    rng, now, times = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def _log_normal(rng: random.Random, median: float, sigma: float, most: float) -> float:
    return min(rng.lognormvariate(math.log(median), sigma), most)


def _scaled(tokens: float, scale: float) -> int:
    return max(1, round(tokens * scale))


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]
