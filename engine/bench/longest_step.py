"""`python -m engine.bench longest_step`: streams decode on one rank's share while a long prompt is prefilled.

The whole engine runs in this process, one arm after another: with bounds on the longest step, and without one, where a
chunk is as long as the token budget. A share makes no sums over ranks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.bench import share
from engine.bench.report import MeasurementError, Report, model_name
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.model_files import ModelFiles
from engine.model_runner import ModelRunner
from engine.sampling_params import SamplingParams

GOAL = 1.2  # p99 between tokens over the bound
_LEAD = 16  # tokens of each stream before anything is measured
_LONG = "long"
SLOWEST = 20  # steps of an arm that the JSON names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    share.add_arguments(parser)
    parser.add_argument("--ep-share", type=int, default=1, metavar="M", help="expert groups of the world (default 1)")
    parser.add_argument("--layers", type=int, help="number of layers (default: all)")
    parser.add_argument("--streams", type=int, default=4, metavar="N", help="requests that decode (default 4)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each stream's prompt (default 4096)")
    parser.add_argument("--stream-tokens", type=int, default=12_000, help="most tokens of a stream (default 12000)")
    parser.add_argument("--prompt", type=int, default=100_000, help="tokens of the long prompt (default 100000)")
    parser.add_argument("--bounds", default="50,25", help="longest steps in ms, one arm each (default 50,25)")
    parser.add_argument(
        "--budgets", default="2048,8192", help="token budgets of the unbounded arms (default 2048,8192)"
    )
    parser.add_argument("--arm-seconds", type=float, default=150, help="give an arm up after so long (default 150)")
    parser.add_argument("--idle-steps", type=int, default=200, help="steps of the streams alone (default 200)")


@dataclass
class Arm:
    """gaps: seconds between two tokens of one stream. chunks: prompt tokens of each step that computed some. seconds:
    from the long prompt's arrival to its first token, or to where the arm was given up. steps: what each read of tokens
    came after."""

    idle_gaps: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    is_done: bool = False
    steps: list[dict[str, float]] = field(default_factory=list)

    def slowest(self) -> list[dict[str, float]]:
        """The longest of its steps, in their order."""
        return sorted(sorted(self.steps, key=lambda step: step["ms"])[-SLOWEST:], key=lambda step: step["number"])


class Streams:
    """Requests that decode in an engine; notes when each gets tokens."""

    def __init__(self, core: EngineCore, prompts: Sequence[list[int]], num_tokens: int):
        self.core = core
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        self._last: dict[str, float] = {}
        self.have_ended = False
        self._counts = {f"stream {index}": 0 for index in range(len(prompts))}
        for name, prompt in zip(self._counts, prompts, strict=True):
            core.add_request(name, prompt, params)
        while min(self._counts.values()) < _LEAD:
            self.step()

    def step(self) -> tuple[list[float], bool]:
        """Seconds since its last token of each stream that got some now; whether the long prompt's answer began."""
        deltas, now, gaps = self.core.step(), time.perf_counter(), []
        for delta in deltas:
            if delta.request_id in self._counts and delta.token_ids:
                self.have_ended |= delta.finish_reason is not None
                self._counts[delta.request_id] += len(delta.token_ids)
                if delta.request_id in self._last:
                    gaps.append(now - self._last[delta.request_id])
                self._last[delta.request_id] = now
        return gaps, any(delta.request_id == _LONG for delta in deltas)


def measure(core: EngineCore, prompts: Sequence[list[int]], long_prompt: list[int], args: argparse.Namespace) -> Arm:
    """Streams alone, then beside the long prompt from its arrival to its first token, or until one has to give up: a
    stream has ended, or --arm-seconds are over."""
    streams, arm = Streams(core, prompts, args.stream_tokens), Arm()
    for _ in range(args.idle_steps):
        arm.idle_gaps += streams.step()[0]
    arrived, computed = time.perf_counter(), 0
    core.add_request(_LONG, long_prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2))
    while not arm.is_done and not streams.have_ended and arm.seconds < args.arm_seconds:
        gaps, arm.is_done = streams.step()
        arm.seconds = time.perf_counter() - arrived
        arm.gaps += gaps
        request = core.replica.scheduler.get(_LONG)
        now_computed = computed if request is None else min(request.num_computed_tokens, len(long_prompt))
        if now_computed > computed:
            arm.chunks.append(now_computed - computed)
        if gaps:
            arm.steps.append(_step(core, len(arm.steps), max(gaps), now_computed - computed, now_computed))
        computed = now_computed
    for request_id in core.unfinished_ids():
        core.abort_request(request_id)
    while core.has_unfinished():
        core.step()
    return arm


def _step(core: EngineCore, number: int, gap: float, chunk: int, computed: int) -> dict[str, float]:
    """What was computed of the prompt when tokens were read, the chunk launched meanwhile with it; expected: of the
    last step that was planned."""
    budget = core.stats().step_budget
    expected = budget.predicted_seconds if budget is not None else 0.0
    return {"number": number, "ms": gap * 1e3, "chunk": chunk, "computed": computed, "expected ms": expected * 1e3}


def row_of(arm: Arm, bound_ms: float, budget: int) -> dict[str, Any]:
    """Raises MeasurementError for an arm in which nothing was prefilled."""
    if not arm.chunks or not arm.gaps:
        raise MeasurementError("the streams ended before anything was prefilled; raise --stream-tokens.")
    p99 = percentile(arm.gaps, 0.99) * 1e3
    tenth = max(len(arm.chunks) // 10, 1)
    return {
        "longest step ms": bound_ms or None,
        "token budget": budget,
        "idle p50 ms": percentile(arm.idle_gaps, 0.5) * 1e3,
        "p50 ms": percentile(arm.gaps, 0.5) * 1e3,
        "p99 ms": p99,
        "max ms": max(arm.gaps) * 1e3,
        "p99 / bound": p99 / bound_ms if bound_ms else None,
        "goal": GOAL if bound_ms else None,
        "first token s": arm.seconds if arm.is_done else None,
        "prefilled": sum(arm.chunks),
        "prefill tok/s": sum(arm.chunks) / arm.seconds,
        "steps": len(arm.chunks),
        "chunk, first tenth": statistics.median(arm.chunks[:tenth]),
        "chunk, last tenth": statistics.median(arm.chunks[-tenth:]),
    }


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured, MeasurementError where nothing was."""
    bounds, budgets = _bounds(args.bounds), share.parse_counts(args.budgets, "--budgets")
    for name in ("streams", "context", "prompt", "idle_steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}.")
    if args.stream_tokens <= _LEAD + args.idle_steps:
        raise ConfigError(f"--stream-tokens must be more than {_LEAD + args.idle_steps}, not {args.stream_tokens}.")
    runner = _runner(args, max(budgets))
    files = ModelFiles.read(runner.config)
    *prompts, long_prompt = _prompts(runner, args)
    arms = [(bound, budgets[0]) for bound in bounds] + [(0.0, budget) for budget in budgets]
    rows, slowest = [], []
    for bound, budget in arms:
        config = replace(runner.config, max_step_ms=bound, max_num_batched_tokens=budget)
        arm = measure(EngineCore(config, files, runner), prompts, long_prompt, args)
        rows.append(row_of(arm, bound, budget))
        slowest.append(arm.slowest())
    unbounded = max(row["prefill tok/s"] for row in rows[len(bounds) :])
    for row in rows:
        row["/ unbounded"] = row["prefill tok/s"] / unbounded
    return _report(runner, rows, slowest, args)


def _report(
    runner: ModelRunner, rows: list[dict[str, Any]], slowest: list[list[dict[str, float]]], args: argparse.Namespace
) -> Report:
    layers = runner.model_config.num_hidden_layers
    notes = [
        f"{args.streams} streams behind prompts of {args.context} tokens, and a prompt of {args.prompt}.",
        "p50, p99, max: between two tokens of one stream, from the long prompt's arrival to its first token; idle: "
        "before it.",
        "/ unbounded: prefill over the fastest arm without a bound. chunk: prompt tokens of a step, medians. An arm "
        "without a first token was given up: late chunks, which cost most, are missing in its figures.",
    ]
    data = {
        "goals": "inter-token p99 within 1.2x of the longest step",
        "model": model_name(args.model),
        "layers": layers,
        "world": {"tp": runner.parallel.tp, "ep": runner.parallel.ep},
        "settings": share.settings(args),
        "slowest_steps": slowest,  # of each row
        "measured_at_start": [
            dict(zip(("tokens", "context", "seconds"), t, strict=True)) for t in runner.prefill_times
        ],
    }
    title = f"The longest step on one rank of TP{args.tp_share}, EP{args.ep_share}, {layers} layers: "
    return Report(title + model_name(args.model), rows, notes, data)


def _runner(args: argparse.Namespace, budget: int) -> ModelRunner:
    overrides = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config: EngineConfig = share.share_config(
        args, args.ep_share, hf_overrides=overrides, max_num_batched_tokens=budget
    )
    one = share.blocks_of(args.context + args.stream_tokens)
    needs = args.streams * one + share.blocks_of(args.prompt + 2)
    longest = max(args.context + args.stream_tokens, args.prompt + 2)
    return share.build_runner(config, needs, longest, args.streams + 1)


def _prompts(runner: ModelRunner, args: argparse.Namespace) -> list[list[int]]:
    """The streams' and the long one, of tokens that have an embedding on rank 0."""
    generator = torch.Generator().manual_seed(args.seed)
    vocabulary = runner.model_config.vocab_size // runner.parallel.tp
    lengths = itertools.chain(itertools.repeat(args.context, args.streams), [args.prompt])
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def _bounds(text: str) -> list[float]:
    try:
        bounds = [float(part) for part in text.split(",")]
    except ValueError:
        bounds = []
    if not bounds or not all(bound > 0 for bound in bounds):
        raise ConfigError(f"--bounds must be milliseconds above 0 such as 50,25, not {text!r}.")
    return bounds
