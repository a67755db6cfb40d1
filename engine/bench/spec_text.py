"""Speculation with a real target and draft on texts: accept lengths, and tokens a second with the draft and without.

Prompts are held out and grouped by source, since accept lengths depend on what is written. Answers are greedy. Both
engines live in one process and take turns, so that ratios do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from engine.bench import share
from engine.bench.report import Report, format_table, model_name, summarise
from engine.config import TINY_CHECKPOINT, ConfigError, EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.sampling_params import SamplingParams

PROMPTS = Path(__file__).parent / "prompts" / "tiny.json"
GAIN_SOURCES = ("tools", "json")
GAIN_GOAL, LOSS_GOAL, LARGE_BATCH_GOAL = 1.3, 0.97, 0.99  # speedups of one request, and where many make it no gain
LENGTH_GOALS = {"chat": 1.8, "tools": 2.5, "json": 2.5}  # at three guesses
MOST_GUESSES = 7
_CACHE_GB = 0.25


@dataclass
class Decoded:
    """Answers in prompt order. seconds, cpu_seconds, num_timed: of the steps in which every request of the batch had
    its first token, and of the tokens of those steps; whole_seconds, num_steps: of all steps."""

    answers: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    whole_seconds: float = 0.0
    num_timed: int = 0
    num_steps: int = 0

    @classmethod
    def sum(cls, parts: list[Decoded]) -> Decoded:
        return cls(
            [answer for part in parts for answer in part.answers],
            *(sum(getattr(part, f.name) for part in parts) for f in fields(cls)[1:]),
        )

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_timed / self.seconds

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


def read_prompts(path: Path, limit: int) -> dict[str, list[list[int]]]:
    """At most `limit` prompts of each source. Raises ConfigError for a file that holds none."""
    try:
        sources = json.loads(path.read_text())["sources"]
        prompts = {name: [list(map(int, ids)) for ids in group[:limit]] for name, group in sources.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"--texts {path}: not a file of prompts by source ({error}).") from None
    if not prompts or not all(prompts.values()):
        raise ConfigError(f"--texts {path}: a source without prompts; give token ids for each.")
    return prompts


def engine_config(args: argparse.Namespace, num_guesses: int | None, adaptive: bool) -> EngineConfig:
    """None: without a draft."""
    return EngineConfig(
        model=args.model,
        draft=None if num_guesses is None else args.draft,
        num_draft_tokens=num_guesses or 1,
        adaptive_draft_tokens=adaptive,
        device=args.device,
        dtype=args.dtype,
        seed=args.seed,
        enforce_eager=args.eager,
        num_threads=args.num_threads,
        kv_cache_memory_gb=_CACHE_GB,
        expert_load=False,
    )


def decode(core: EngineCore, prompts: list[list[int]], num_tokens: int) -> Decoded:
    """Greedy answers to all prompts at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        answers[f"text-{index}"] = []
        core.add_request(f"text-{index}", prompt, params)
    steps, begin = core.replica.num_steps, time.perf_counter()
    since = None
    while core.has_unfinished():
        for delta in core.step():
            answers[delta.request_id] += delta.token_ids
        if since is None and all(answers.values()):
            since, cpu_since, before = time.perf_counter(), time.process_time(), sum(map(len, answers.values()))
    end = time.perf_counter()
    return Decoded(
        list(answers.values()),
        end - since,
        time.process_time() - cpu_since,
        end - begin,
        sum(map(len, answers.values())) - before,
        core.replica.num_steps - steps,
    )


def accept_length(core: EngineCore, prompts: list[list[int]], num_tokens: int) -> tuple[float, Decoded]:
    """Tokens that a verify step committed for a request, its own token included."""
    before = core.stats().speculation
    decoded = decode(core, prompts, num_tokens)
    after = core.stats().speculation
    chains = after.num_drafts - before.num_drafts
    return 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / max(chains, 1), decoded


def measure_lengths(
    args: argparse.Namespace, prompts: dict[str, list[list[int]]], plain: dict[str, list[list[int]]]
) -> list[dict[str, Any]]:
    """A row for each source: accept lengths of 1 to MOST_GUESSES guesses, and answers that are not the plain ones."""
    rows = {name: {"text": name, "prompts": len(group), "different": 0} for name, group in prompts.items()}
    for count in range(1, args.most_guesses + 1):
        core, ranks = start_engine(engine_config(args, count, adaptive=False))
        for name, group in prompts.items():
            length, decoded = accept_length(core, group, args.tokens)
            rows[name][f"k={count}"] = length
            rows[name]["different"] += count_different(decoded.answers, plain[name])
        ranks.close()
    for name, row in rows.items():
        row["goal at 3"] = LENGTH_GOALS.get(name)
        row["different"] = row.pop("different")  # last column
    return list(rows.values())


def count_different(some: list[list[int]], others: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))


def take_turns(
    cores: dict[str, EngineCore], batches: list[list[list[int]]], num_tokens: int, rounds: int
) -> dict[str, list[Decoded]]:
    """Every batch by every engine, the order turned round each time, before the next batch: one sum a round."""
    runs: dict[str, list[Decoded]] = {name: [] for name in cores}
    for number in range(rounds):
        parts: dict[str, list[Decoded]] = {name: [] for name in cores}
        for index, prompts in enumerate(batches):
            names = list(cores) if (number + index) % 2 == 0 else reversed(list(cores))
            for name in names:
                parts[name].append(decode(cores[name], prompts, num_tokens))
        for name in cores:
            runs[name].append(Decoded.sum(parts[name]))
    return runs


def goal_of(source: str, batch: int) -> float:
    if batch > 1:
        return LARGE_BATCH_GOAL if batch >= 16 else LOSS_GOAL
    return GAIN_GOAL if source in GAIN_SOURCES else LOSS_GOAL


def measure_speed(
    cores: dict[str, EngineCore], source: str, prompts: list[list[int]], batch: int, args: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """A row, and the plain answers. `cores`: "plain" and "draft"; each decodes a batch before the clock starts."""
    batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    take_turns(cores, batches[:1], args.tokens, 1)
    runs = take_turns(cores, batches, args.tokens, args.rounds)
    plain, draft = runs["plain"], runs["draft"]
    speed = {name: summarise([run.rate for run in of_arm]) for name, of_arm in runs.items()}
    whole = {name: Decoded.sum(of_arm) for name, of_arm in runs.items()}
    ratio, goal = speed["draft"].median / speed["plain"].median, goal_of(source, batch)
    return {
        "text": source,
        "batch": batch,
        "plain tok/s": speed["plain"].median,
        "spread": speed["plain"].spread,
        "draft tok/s": speed["draft"].median,
        "spread ": speed["draft"].spread,
        "ratio": ratio,
        "goal": goal,
        "reached": ratio >= goal,
        "CPU time": whole["plain"].cpu_seconds / whole["draft"].cpu_seconds,
        "steps": whole["draft"].num_steps / whole["plain"].num_steps,
        "with prompts": whole["plain"].whole_seconds / whole["draft"].whole_seconds,
        "different": sum(count_different(run.answers, plain[0].answers) for run in draft),
    }, plain[0].answers


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    for name in ("tokens", "rounds", "prompts"):
        if getattr(args, name) < (2 if name == "tokens" else 1):
            raise ConfigError(f"--{name} must be at least {2 if name == 'tokens' else 1}, not {getattr(args, name)}.")
    batches = share.parse_counts(args.batches, "--batches")
    prompts = read_prompts(Path(args.texts), args.prompts)
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    plain, plain_ranks = start_engine(engine_config(args, None, adaptive=False))
    drafting, drafting_ranks = start_engine(engine_config(args, args.num_draft_tokens, adaptive=True))
    cores = {"plain": plain, "draft": drafting}
    rows, answers = [], {}
    for batch in batches:
        for source, group in prompts.items():
            enough = (group * -(-batch // len(group)))[: max(batch, len(group))]
            row, expected = measure_speed(cores, source, enough, batch, args)
            rows.append(row)
            answers.setdefault(source, expected[: len(group)])
    drafting_ranks.close()
    plain_ranks.close()
    lengths = measure_lengths(args, prompts, answers) if args.most_guesses else []
    notes = [
        f"\n{format_table(lengths)}\n",
        f"tok/s: of steps in which all requests decode, up to {args.tokens} tokens an answer, with up to "
        f"{args.num_draft_tokens} guesses, as many as the engine finds to pay; medians of {args.rounds} rounds that "
        "take turns. CPU time: the ratio in seconds of the CPU, which others on the machine do not take. "
        "steps: the draft's over plain ones. with prompts: the ratio with the prompts' own steps.",
        "k: guesses verified in every step, and tokens that such a step commits. different: answers that are not the "
        "plain engine's, of all runs. spread: (largest - smallest) / median.",
    ]
    data = {
        "goals": "G5",
        "model": model_name(args.model),
        "settings": {k: v for k, v in share.settings(args).items() if k != "texts"},
        "accept_lengths": lengths,
    }
    return Report(f"Speculation on texts: {model_name(args.model)}", rows, notes, data)


def set_defaults(args: argparse.Namespace) -> None:
    """What the options mean for texts where they were left out."""
    args.model = args.model or str(TINY_CHECKPOINT)
    args.tokens = args.tokens or 64
