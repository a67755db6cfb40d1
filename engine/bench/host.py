"""`python -m engine.bench host`: microseconds that the host works for a decode step, part by part (goal G10), and for
an event of a stream over HTTP.

The scheduler, the inputs of a graph, what is read back and what callers see are the engine's own; the device takes no
time. `engine.bench serve --host-cost` measures the same on the device that it has loaded.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

import torch

from engine.bench.host_events import measure_events
from engine.bench.host_parts import PARTS, WAIT, PartsClock, clocked
from engine.bench.report import Report, format_table, model_name
from engine.bench.serve_stats import percentile
from engine.bench.share import parse_counts
from engine.cache_plan import BLOCK_SIZE
from engine.config import FULL_CONFIG, ConfigError, EngineConfig
from engine.core import EngineCore
from engine.decode_batch import BlockTable, DecodeBatch, bucket_sizes
from engine.input_batch import SampledTokens
from engine.model_files import ModelFiles
from engine.sampling_params import SamplingParams
from engine.scheduler import SchedulerOutput
from engine.step_output import ModelRunnerOutput, ReadBuffers

GOALS_US = {1: 150.0, 64: 1000.0}  # requests -> scheduler and inputs
WARM_UP_STEPS = 50
_CPU = torch.device("cpu")
A_WORD = 300  # a token that is a word in every made-up vocabulary


class InstantRunner:
    """A device that takes no time: a step's inputs are filled as a graph's are, and its tokens are always the same."""

    overlaps, num_guesses, num_host_blocks = True, 0, 0

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self.max_model_len = max_model_len
        self.num_blocks = 1 + max_num_seqs * -(-max_model_len // BLOCK_SIZE)
        self.sampled = SampledTokens(max_num_seqs, _CPU)
        self.sampled.state.tokens_SW.fill_(A_WORD)
        self._reads = ReadBuffers(max_num_seqs, 0, _CPU)
        table = BlockTable(max_num_seqs, -(-max_model_len // BLOCK_SIZE), _CPU)
        sizes = bucket_sizes(max_num_seqs)
        self._inputs = {size: DecodeBatch(size, BLOCK_SIZE, table, self.sampled, _CPU) for size in sizes}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        items = output.scheduled
        if all(item.samples and item.num_tokens == 1 for item in items):
            size = next(size for size in self._inputs if size >= len(items))
            self._inputs[size].fill(items, 1)
        sampling = [item.request for item in items if item.samples]
        self.sampled.belong_to(sampling)
        return ModelRunnerOutput(unread=self._reads.start(self.sampled.state, len(sampling)))

    def replays(self, num_requests: int) -> bool:
        return True

    def failure(self) -> str | None:
        return None


def measure_host(core: EngineCore, vocabulary: int, batch: int, context: int, steps: int) -> dict[str, Any]:
    """A row: medians of each part, us, over `steps` steps in which `batch` requests behind `context` tokens decode."""
    rng = random.Random(batch)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + 3 * WARM_UP_STEPS)
    for index in range(batch):
        core.add_request(f"host-{index}", [rng.randrange(vocabulary) for _ in range(context)], params)
    begun: dict[str, int] = {}
    while len(begun) < batch or min(begun.values()) < WARM_UP_STEPS:
        for delta in core.step():
            begun[delta.request_id] = begun.get(delta.request_id, 0) + len(delta.token_ids)
    clock, samples = PartsClock(), []
    with clocked(clock, type(core.replica.runner)):
        for _ in range(steps):
            core.step()
            samples.append(clock.take())
    for request_id in core.unfinished_ids():
        core.abort_request(request_id)
    while core.has_unfinished():
        core.step()
    return _row(batch, context, samples)


def _row(batch: int, context: int, samples: list[dict[str, float]]) -> dict[str, Any]:
    def median(*parts: str) -> float:
        return statistics.median(sum(sample.get(part, 0.0) for part in parts) for sample in samples) * 1e6

    whole = [sum(sample.get(part, 0.0) for part in PARTS) for sample in samples]
    row: dict[str, Any] = {"requests": batch, "context": context} | {part: median(part) for part in PARTS}
    row |= {"schedule + inputs": median("schedule", "inputs"), "goal": GOALS_US.get(batch)}
    row |= {"whole step": statistics.median(whole) * 1e6, "p99": percentile(whole, 99) * 1e6}
    return row | {"waited for the device": median(WAIT)}


NOTES = (
    "us, medians. inputs: what a graph reads; launch: its launch and the copy back; update: tokens read and taken;",
    "output: text and what callers see; rest: plans, limits, other ranks. Steps overlap: the device waits only for",
    "what is longer than its own step.",
)


EVENT_NOTES = (
    "CPU us of the server's event loop for an event of a stream, sockets included, the core's thread apart; late: how",
    "far that thread is behind its clock, since both share one interpreter; merged: part of the words that share an",
    "event with another, since the event loop was behind.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", default="1,8,64", metavar="N,M", help="requests that decode (default 1,8,64)")
    parser.add_argument("--context", type=int, default=1024, help="tokens before them (default 1024)")
    parser.add_argument("--steps", type=int, default=500, help="measured steps (default 500)")
    parser.add_argument("--streams", default="1,64", metavar="N,M", help="streams over HTTP (default 1,64; none: 0)")


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured."""
    batches = parse_counts(args.batch, "--batch")
    streams = [] if args.streams == "0" else parse_counts(args.streams, "--streams")
    if args.steps < 1 or args.context < 1:
        raise ConfigError("--steps and --context must be at least 1.")
    longest = args.context + args.steps + 4 * WARM_UP_STEPS
    config = EngineConfig(
        model=str(FULL_CONFIG), load_format="dummy", device="cpu", max_num_seqs=max(batches), max_model_len=longest
    ).resolve(0)
    files = ModelFiles.read(config)
    rows = []
    for batch in batches:
        core = EngineCore(config, files, InstantRunner(max(batches), longest))
        rows.append(measure_host(core, files.model_config.vocab_size - 256, batch, args.context, args.steps))
    events = [measure_events(config, files.tokenizer, count) for count in streams]
    notes = [*NOTES, *([f"\n{format_table(events)}\n", *EVENT_NOTES] if events else [])]
    data = {
        "goals": "G10",
        "model": model_name(str(FULL_CONFIG)),
        "device_of_steps": "none: it takes no time",
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "events": events,
    }
    return Report("The host's work for a decode step, without a device", rows, notes, data)
