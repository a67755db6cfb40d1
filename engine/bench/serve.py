"""`python -m engine.bench serve`: one engine under load, in process and over HTTP (goal G8), with its prefix cache and
without.

The engine is loaded once. Every sample gets an empty cache: a core of its own over the same weights, or with several
ranks the one core that they follow, flushed. Arms take turns within a round and get the same requests. See
docs/serving_bench.md for how to read the result.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bench import traces
from engine.bench.host import NOTES, WARM_UP_STEPS, measure_host
from engine.bench.report import MeasurementError, Report, format_table, model_name
from engine.bench.serve_arms import ClientProcess, InProcess, http_server
from engine.bench.serve_load import Load
from engine.bench.serve_options import BASELINE, add_arguments, engine_config, plans_of, points_of
from engine.bench.serve_stats import Limits, Record, summarise_load
from engine.bench.serve_tables import Point, Sample, cache_rows, ratio_rows
from engine.bench.share import settings
from engine.collector import spare_the_engine
from engine.config import ConfigError
from engine.core import EngineCore
from engine.launch import start_engine
from engine.model_files import ModelFiles

__all__ = ["add_arguments", "run"]

_HOST_STEPS = 300


@dataclass
class Engine:
    """The loaded weights, from which cores are made; `carrier`: what carries HTTP, once it did. leading: the one core,
    where other ranks follow it."""

    config: Any
    files: ModelFiles
    runner: Any
    leading: EngineCore | None = None
    clients: ClientProcess | None = None
    carrier: str | None = None

    def core(self, arm: str) -> EngineCore:
        if self.leading is not None:
            self.leading.flush_prefix_cache()
            return self.leading
        cached = self.config.enable_prefix_caching and not arm.endswith(BASELINE)
        return EngineCore(replace(self.config, enable_prefix_caching=cached), self.files, self.runner)

    @property
    def vocabulary(self) -> int:
        """Ordinary tokens that rank 0 of the world holds."""
        ordinary = self.files.model_config.vocab_size - 256
        return min(ordinary, self.files.model_config.vocab_size // self.runner.parallel.tp)

    def sample(self, arm: str, load: Load, limits: Limits) -> Sample:
        core = self.core(arm)
        before = core.stats().num_preemptions
        if arm.startswith("http"):
            records = self._over_http(core, load)
        else:
            InProcess(core, self._warm_up()).run()
            records = InProcess(core, load).run()
        preempted = core.stats().num_preemptions - before
        return Sample(summarise_load(records, limits) | {"preempted": preempted}, records)

    def _over_http(self, core: EngineCore, load: Load) -> list[Record]:
        self.clients = self.clients or ClientProcess()
        with http_server(core) as (port, self.carrier):
            self.clients.run(port, self._warm_up())
            records = self.clients.run(port, load)
        while core.has_unfinished():  # a step that was launched ahead
            core.step()
        return records

    def _warm_up(self) -> Load:
        return Load(traces.fixed(2, 8, 4, self.vocabulary, seed=-1), concurrency=2)

    def close(self) -> None:
        if self.clients is not None:
            self.clients.close()


def _load(point: Point, engine: Engine, number: int) -> Load:
    args = point.args
    seed = args.seed * 1_000_003 + number * 1_009 + (point.concurrency or 0)
    count = args.requests or (point.concurrency * args.waves if point.concurrency else 32)
    sessions = _sessions(args, count, engine, seed)
    if point.concurrency is not None:
        return Load(sessions, concurrency=point.concurrency)
    return Load(sessions, arrivals=traces.arrivals(count, point.rate, seed))


def _sessions(args: argparse.Namespace, count: int, engine: Engine, seed: int) -> list[traces.Session]:
    vocabulary, longest = engine.vocabulary, engine.runner.max_model_len
    if args.trace == "agents":
        scale = args.scale or min(1.0, longest / 2**17)
        sessions = traces.agents(count, args.turns, scale, longest, vocabulary, seed, args.think)
    else:
        share = args.share if args.trace == "shared-prefix" else 0.0
        lengths = args.prompt_tokens, args.output_tokens
        sessions = traces.shared_prefix(count, *lengths, share, args.groups, vocabulary, seed)
    if not all(session.turns and session.num_tokens <= longest for session in sessions):
        raise ConfigError(f"the trace's requests are longer than the engine's {longest} tokens; ask for shorter ones.")
    return sessions


@contextmanager
def _engine(args: argparse.Namespace) -> Iterator[Engine]:
    config = engine_config(args)
    core, ranks = start_engine(config)
    try:
        files, runner = ModelFiles.read(core.config), core.replica.runner
        leading = None
        if config.tp > 1:  # its ranks outlive a server's end
            leading = EngineCore(core.config, files, runner, ranks.control)
        engine = Engine(core.config, files, runner, leading)
        spare_the_engine()  # as a server does
        try:
            yield engine
        finally:
            gc.unfreeze()
            engine.close()
    finally:
        ranks.close()


def run(args: argparse.Namespace) -> Report:
    """Raises ConfigError for a setting that cannot be measured, MeasurementError where no request was answered."""
    plans = plans_of(args, torch.cuda.is_available())
    points = [Point(plan, *setting) for plan in plans for setting in points_of(plan)]
    with _engine(plans[0]) as engine:
        for point in points:
            _measure(point, engine)
        return _report(plans, engine, points, _host_rows(plans[0], engine, points) if args.host_cost else [])


def _host_rows(args: argparse.Namespace, engine: Engine, points: list[Point]) -> list[dict[str, Any]]:
    steps = min(_HOST_STEPS, engine.runner.max_model_len - args.prompt_tokens - 4 * WARM_UP_STEPS)
    if steps < 1:
        raise ConfigError(f"--host-cost decodes behind {args.prompt_tokens} tokens; raise --max-model-len.")
    batches = sorted({point.concurrency for point in points if point.concurrency})
    return [
        measure_host(engine.core("in-process"), engine.vocabulary, batch, args.prompt_tokens, steps)
        for batch in batches
    ]


def _measure(point: Point, engine: Engine) -> None:
    """Arms take turns, the other way round in every second round."""
    args, arms = point.args, point.args.arms.split(",")
    limits = Limits(args.ttft_limit_ms / 1e3, args.itl_limit_ms / 1e3)
    point.samples = {arm: [] for arm in arms}
    for number in range(args.rounds):
        load = _load(point, engine, number)
        for arm in arms if number % 2 == 0 else reversed(arms):
            started = time.monotonic()
            sample = engine.sample(arm, load, limits)
            seconds = time.monotonic() - started
            progress = f"{point.name}, {arm}, round {number + 1} of {args.rounds}: {seconds:.1f} s"
            print(progress, file=sys.stderr, flush=True)
            if not any(record.ok for record in sample.records):
                raise MeasurementError(f"{point.name}, {arm}: no request was answered: {sample.figures}")
            point.samples[arm].append(sample)


def _report(plans: list[argparse.Namespace], engine: Engine, points: list[Point], host: list[dict[str, Any]]) -> Report:
    rows = [point.row(arm) for point in points for arm in point.samples]
    ratios, caches = ratio_rows(points), cache_rows(points)
    notes = [f"\n{format_table(table)}\n" for table in (ratios, caches) if table]
    notes += [f"The host's work for a decode step\n{format_table(host)}", *NOTES, ""] if host else []
    notes += ["TTFT, ITL in ms: medians of the rounds; spread: (largest - smallest) / median of tok/s."]
    limits = ", ".join(f"{plan.ttft_limit_ms:g} and {plan.itl_limit_ms:g} ms ({plan.preset})" for plan in plans)
    notes += [f"good: first token, and 99 % of the gaps after it, within {limits}."]
    if engine.carrier is not None:
        notes.append(f"HTTP: {engine.carrier}, clients in a process of their own.")
    parallel, model = engine.runner.parallel, engine.files.model_config
    data = {
        "goals": "G8",
        "model": model_name(engine.config.model),
        "layers": model.num_hidden_layers,
        "world": {"tp": parallel.tp, "ep": parallel.ep},
        "settings": {plan.preset: settings(plan) for plan in plans},
        "max_model_len": engine.runner.max_model_len,
        "http_over_in_process": ratios,
        "prefix_cache": caches,
        "host": host,
        "http": engine.carrier,
        "samples": [
            {"load": point.name, "arm": arm, "rounds": [sample.figures for sample in samples]}
            for point in points
            for arm, samples in point.samples.items()
        ],
    }
    title = f"Serving under load: {model_name(engine.config.model)}, {model.num_hidden_layers} layers"
    return Report(title, rows, notes, data)
