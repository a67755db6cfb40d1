"""Speculation on one rank's share at forced accept lengths: what each number of guesses costs, and what the engine
makes of it (goal G5).

A share makes no sums over ranks. Steps are timed as in `engine.bench step`. Then the engine itself decodes, choosing
the number of guesses as it does in service: its rate is set against that of the same engine without a draft.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.bench import share
from engine.bench.forced import ForcedRunner
from engine.bench.gpu_timing import Timing
from engine.bench.report import Report, format_table, model_name
from engine.bench.step_timing import time_steady
from engine.comm.control import ControlServer
from engine.config import ConfigError
from engine.core import EngineCore
from engine.graph import CudaRecorder
from engine.model_files import ModelFiles
from engine.sampling_params import SamplingParams
from engine.scheduler import GuessPlan, ScheduledRequest, SchedulerOutput

_LEAD = 256  # tokens of each request before the clock starts
GOALS = {2.0: 1.10, 2.5: 1.40, 3.0: 1.65}  # accept length of three guesses -> speedup of one request, G5
VERIFY_GOAL = 1.82


def guessing_step(runner: Any, batch: int, context: int, num_guesses: int) -> SchedulerOutput:
    """A decode step of `batch` requests at `context` tokens that verifies and makes num_guesses guesses of each."""
    blocks = share.shuffled_blocks(runner.num_blocks - 1, seed=batch)
    vocabulary = runner.model_config.vocab_size // runner.parallel.tp
    longest = context + 2 * num_guesses + 1
    step = share.contexts_step(vocabulary, batch, longest, longest - context + 1, blocks, seed=context)
    items = []
    for item in step.scheduled:
        request = item.request
        last, *guesses = request.prompt_token_ids[context - 1 : context + num_guesses]
        request.prompt_token_ids[context - 1 :] = [last]
        request.max_tokens, request.guess_ids = 1000, guesses
        request.num_computed_tokens = context - 1
        items.append(ScheduledRequest.next_of(request, 1, num_guesses))
    return SchedulerOutput(items, plan=GuessPlan(num_guesses, num_guesses))


def measure_costs(runner: Any, batch: int, context: int, replays: int) -> list[dict[str, Any]]:
    """A row for a step without a draft and for each number of guesses that a graph verifies."""
    with without_draft(runner, batch):
        plain, _ = time_steady(runner, guessing_step(runner, batch, context, 0), replays)
    rows = [_cost_row(batch, context, "no draft", plain, plain.median)]
    for count in range(runner.num_guesses + 1) if runner.graphs is None else runner.graphs.num_verify(batch):
        timing, _ = time_steady(runner, guessing_step(runner, batch, context, count), replays)
        rows.append(_cost_row(batch, context, count, timing, plain.median))
    return rows


def _cost_row(batch: int, context: int, guesses: int | str, timing: Timing, plain: float) -> dict[str, Any]:
    return {
        "step": f"{batch} @ {context}",
        "guesses": guesses,
        "ms": timing.median * 1e3,
        "spread": timing.spread,
        "/ plain": timing.median / plain,
        "goal": VERIFY_GOAL if (batch, guesses) == (1, 3) else None,
    }


@contextmanager
def without_draft(runner: Any, batch: int) -> Iterator[None]:
    """Within it the runner is one that has no draft, its steps of `batch` requests captured anew."""
    step, before = runner.sampled_step, runner.graphs
    drafter, runner.drafter, step.drafter = runner.drafter, None, None
    guesses, runner.num_guesses = runner.num_guesses, 0
    forced, step.verify_ops = step.verify_ops, step.verify_ops.found
    try:
        if before is not None:
            runner.capture(CudaRecorder(runner.parallel.device), [batch])
        yield
    finally:
        if before is not None:
            runner.graphs.close()
        runner.graphs, runner.drafter, step.drafter, runner.num_guesses = before, drafter, drafter, guesses
        step.verify_ops = forced


def decode_rate(
    runner: Any, files: ModelFiles, batch: int, context: int, num_tokens: int, control: ControlServer | None = None
) -> dict[str, Any]:
    """Tokens a second of the whole engine while `batch` requests decode num_tokens tokens each behind their prompts of
    `context` tokens, from the first step in which all of them decode. Steps and what they held by number of guesses.

    control: of the ranks that follow, which may return at the end."""
    core = EngineCore(runner.config, files, runner, control)
    vocabulary = runner.model_config.vocab_size // runner.parallel.tp
    generator = torch.Generator().manual_seed(batch)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens + _LEAD)
    for index in range(batch):
        prompt = torch.randint(vocabulary, (context,), generator=generator).tolist()
        core.add_request(f"bench-{index}", prompt, params)
    started: dict[str, int] = {}
    while len(started) < batch or min(started.values()) < _LEAD // 2:
        for delta in core.step():
            started[delta.request_id] = started.get(delta.request_id, 0) + len(delta.token_ids)
    steps, verified, tokens, start = core.replica.num_steps, _num_verified(core), 0, time.perf_counter()
    while tokens < batch * num_tokens // 2 and len(core.unfinished_ids()) == batch:
        tokens += sum(len(delta.token_ids) for delta in core.step())
    seconds = time.perf_counter() - start
    steps, verified = core.replica.num_steps - steps, _num_verified(core) - verified
    for request_id in core.unfinished_ids():
        core.abort_request(request_id)
    while core.has_unfinished():
        core.step()
    core.return_to_ranks([])
    return {
        "tok/s": tokens / seconds,
        "tokens a step": tokens / steps / batch,
        "ms a step": seconds / steps * 1e3,
        "verify steps": verified / steps,
    }


def _num_verified(core: EngineCore) -> int:
    spec = core.stats().speculation
    return 0 if spec is None else spec.num_verify_steps


def measure_engine(
    runner: Any, files: ModelFiles, batch: int, context: int, lengths: list[float], num_tokens: int
) -> list[dict[str, Any]]:
    """A row for the engine without a draft and one for each accept length, 1.0 standing for a useless draft."""
    with without_draft(runner, batch):
        plain = decode_rate(runner, files, batch, context, num_tokens)
    rows = [{"engine": f"{batch} @ {context}", "accept length of 3": "no draft", **plain, "speedup": 1.0, "goal": None}]
    for length in lengths:
        runner.forced.set(length)
        rate = decode_rate(runner, files, batch, context, num_tokens)
        rows.append(
            {
                "engine": f"{batch} @ {context}",
                "accept length of 3": length,
                **rate,
                "speedup": rate["tok/s"] / plain["tok/s"],
                "goal": GOALS.get(length) if batch == 1 else 0.97 if length == 1.0 else 0.99,
            }
        )
    return rows


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    points = share.parse_points(args.points, "--points")
    lengths = _lengths(args.accept_lengths, args.num_draft_tokens)
    most = max(batch for batch, _ in points)
    config = share.share_config(
        args,
        args.ep_share,
        draft=args.draft,
        num_draft_tokens=args.num_draft_tokens,
        max_num_batched_tokens=args.chunk,
        hf_overrides={} if args.layers is None else {"num_hidden_layers": args.layers},
    )
    longest = max(context for _, context in points) + args.tokens + 2 * _LEAD
    needs = [batch * share.blocks_of(context + args.tokens + 2 * _LEAD) for batch, context in points]
    runner = share.build_runner(config, max(needs), longest, most, runner_class=ForcedRunner)
    files = ModelFiles.read(config)
    costs = [row for point in points for row in measure_costs(runner, *point, args.replays)]
    rates = [row for point in points for row in measure_engine(runner, files, *point, lengths, args.tokens)]
    layers = runner.model_config.num_hidden_layers
    notes = [
        f"\n{format_table(rates)}\n",
        "/ plain: over the same step of the same engine without a draft.",
        f"tok/s: of {args.tokens // 2} tokens a request, the engine choosing how many guesses to verify; speedup: over "
        "the engine without a draft.",
        "Accept lengths are those that three guesses would have, the same chance for each next guess; fewer have less.",
        "spread: (p90 - p10) / median. No sums over ranks are made.",
    ]
    data = {
        "goals": "G5",
        "model": model_name(args.model),
        "layers": layers,
        "world": {"tp": runner.parallel.tp, "ep": runner.parallel.ep},
        "settings": share.settings(args),
        "engine": rates,
    }
    title = (
        f"Speculation on one rank of TP{args.tp_share}, EP{args.ep_share}, {layers} layers: {model_name(args.model)}"
    )
    return Report(title, costs, notes, data)


def _lengths(text: str, num_guesses: int) -> list[float]:
    try:
        lengths = [float(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or not all(1 <= length <= num_guesses + 1 for length in lengths):
        raise ConfigError(f"--accept-lengths must be numbers from 1 to {num_guesses + 1}, not {text!r}.")
    return lengths
