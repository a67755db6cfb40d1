"""`python -m engine.bench serve`: one engine under load, in process and over HTTP (goal G8), with its prefix cache and
without.

The engine is loaded once. Every sample gets an empty cache: a core of its own over the same weights. Arms take turns
within a round and get the same requests. See docs/serving_bench.md for how to read the result.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine.bench import traces
from engine.bench.host import NOTES, WARM_UP_STEPS, measure_host
from engine.bench.report import MeasurementError, Report, format_table, model_name
from engine.bench.serve_arms import ClientProcess, InProcess, http_server
from engine.bench.serve_load import Load
from engine.bench.serve_options import BASELINE, add_arguments, engine_config, fill_in, points_of
from engine.bench.serve_stats import Limits, Record, summarise_load
from engine.bench.share import settings
from engine.collector import spare_the_engine
from engine.config import ConfigError
from engine.core import EngineCore
from engine.launch import start_engine
from engine.model_files import ModelFiles

__all__ = ["add_arguments", "run"]

GOALS = {1: (0.98, 0.995), 8: (0.98, 0.995), 64: (0.97, 0.995)}  # clients -> HTTP over in process, goal and stretch
TTFT_GOAL_MS = 3.0
CACHE_GOAL = 5.0
_HOST_STEPS = 300
_SHOWN = ("tok/s", "decode tok/s", "req/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p50 s", "good", "cached")


@dataclass
class Sample:
    """One arm's run of one point's load in one round."""

    figures: dict[str, Any]
    records: list[Record]


@dataclass
class Engine:
    """The loaded weights, from which cores are made; `carrier`: what carries HTTP, once it did."""

    config: Any
    files: ModelFiles
    runner: Any
    clients: ClientProcess | None = None
    carrier: str | None = None

    def core(self, arm: str) -> EngineCore:
        cached = self.config.enable_prefix_caching and not arm.endswith(BASELINE)
        return EngineCore(replace(self.config, enable_prefix_caching=cached), self.files, self.runner)

    @property
    def vocabulary(self) -> int:
        """Ordinary tokens that rank 0 of the world holds."""
        ordinary = self.files.model_config.vocab_size - 256
        return min(ordinary, self.files.model_config.vocab_size // self.runner.parallel.tp)

    def sample(self, arm: str, load: Load, limits: Limits) -> Sample:
        core = self.core(arm)
        if arm.startswith("http"):
            records = self._over_http(core, load)
        else:
            InProcess(core, self._warm_up()).run()
            records = InProcess(core, load).run()
        return Sample(summarise_load(records, limits) | {"preempted": core.stats().num_preemptions}, records)

    def _over_http(self, core: EngineCore, load: Load) -> list[Record]:
        self.clients = self.clients or ClientProcess()
        with http_server(core) as (port, self.carrier):
            self.clients.run(port, self._warm_up())
            return self.clients.run(port, load)

    def _warm_up(self) -> Load:
        return Load(traces.fixed(2, 8, 4, self.vocabulary, seed=-1), concurrency=2)

    def close(self) -> None:
        if self.clients is not None:
            self.clients.close()


@dataclass
class Point:
    """A load's setting and what its arms did, round by round."""

    name: str
    concurrency: int | None
    rate: float | None
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def load(self, args: argparse.Namespace, engine: Engine, number: int) -> Load:
        seed = args.seed * 1_000_003 + number * 1_009 + (self.concurrency or 0)
        count = args.requests or (self.concurrency * args.waves if self.concurrency else 32)
        sessions = _sessions(args, count, engine, seed)
        if self.concurrency is not None:
            return Load(sessions, concurrency=self.concurrency)
        return Load(sessions, arrivals=traces.arrivals(count, self.rate, seed))

    def median(self, arm: str, figure: str) -> float | None:
        values = [sample.figures[figure] for sample in self.samples[arm]]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def paired(self, arm: str, other: str, figure: str) -> list[tuple[float, float]]:
        """The figure in both arms, of each round in which both have it."""
        pairs = zip(self.samples[arm], self.samples[other], strict=True)
        both = [(one.figures[figure], two.figures[figure]) for one, two in pairs]
        return [pair for pair in both if None not in pair]

    def row(self, arm: str) -> dict[str, Any]:
        figures = [sample.figures for sample in self.samples[arm]]
        rates = [f["tok/s"] for f in figures if f["tok/s"]]
        row: dict[str, Any] = {"load": self.name, "arm": arm, "requests": figures[0]["requests"]}
        row |= {name: self.median(arm, name) for name in _SHOWN}
        row["spread"] = (max(rates) - min(rates)) / statistics.median(rates) if rates else None
        return row | {name: sum(f[name] for f in figures) for name in ("preempted", "429", "errors")}


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
        engine = Engine(core.config, ModelFiles.read(core.config), core.replica.runner)
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
    fill_in(args, torch.cuda.is_available())
    limits = Limits(args.ttft_limit_ms / 1e3, args.itl_limit_ms / 1e3)
    points = [Point(*setting) for setting in points_of(args)]
    with _engine(args) as engine:
        for point in points:
            _measure(point, args, engine, limits)
        return _report(args, engine, points, _host_rows(args, engine, points) if args.host_cost else [])


def _host_rows(args: argparse.Namespace, engine: Engine, points: list[Point]) -> list[dict[str, Any]]:
    steps = min(_HOST_STEPS, engine.runner.max_model_len - args.prompt_tokens - 4 * WARM_UP_STEPS)
    if steps < 1:
        raise ConfigError(f"--host-cost decodes behind {args.prompt_tokens} tokens; raise --max-model-len.")
    batches = [point.concurrency for point in points if point.concurrency]
    return [
        measure_host(engine.core("in-process"), engine.vocabulary, batch, args.prompt_tokens, steps)
        for batch in batches
    ]


def _measure(point: Point, args: argparse.Namespace, engine: Engine, limits: Limits) -> None:
    """Arms take turns, the other way round in every second round."""
    arms = args.arms.split(",")
    point.samples = {arm: [] for arm in arms}
    for number in range(args.rounds):
        load = point.load(args, engine, number)
        for arm in arms if number % 2 == 0 else reversed(arms):
            sample = engine.sample(arm, load, limits)
            if not any(record.ok for record in sample.records):
                raise MeasurementError(f"{point.name}, {arm}: no request was answered: {sample.figures}")
            point.samples[arm].append(sample)


def _ratio_rows(points: list[Point]) -> list[dict[str, Any]]:
    """HTTP over in process, paired by round: medians."""
    rows = []
    for point in points:
        if not {"in-process", "http"} <= point.samples.keys():
            continue
        goal, stretch = GOALS.get(point.concurrency, (None, None))
        whole = [http / inside for http, inside in point.paired("http", "in-process", "tok/s")]
        decode = [http / inside for http, inside in point.paired("http", "in-process", "decode tok/s")]
        added = [http - inside for http, inside in point.paired("http", "in-process", "TTFT p50")]
        rows.append(
            {
                "load": point.name,
                "HTTP / in process": statistics.median(whole),
                "lowest": min(whole),
                "highest": max(whole),
                "while all decode": statistics.median(decode) if decode else None,
                "goal": goal,
                "stretch": stretch,
                "added TTFT ms": statistics.median(added),
                "goal ms": TTFT_GOAL_MS,
            }
        )
    return rows


def _cache_rows(points: list[Point]) -> list[dict[str, Any]]:
    """Without the prefix cache over with it, paired by round: medians."""
    rows = []
    for point in points:
        for arm in point.samples:
            if arm + BASELINE not in point.samples:
                continue
            times = point.paired(arm + BASELINE, arm, "TTFT p50")
            rows.append(
                {
                    "load": point.name,
                    "arm": arm,
                    "TTFT p50 uncached ms": statistics.median(without for without, _ in times),
                    "cached ms": statistics.median(cached for _, cached in times),
                    "times lower": statistics.median(without / cached for without, cached in times),
                    "goal": CACHE_GOAL,
                    "tok/s, times higher": statistics.median(
                        cached / without for without, cached in point.paired(arm + BASELINE, arm, "tok/s")
                    ),
                }
            )
    return rows


def _report(args: argparse.Namespace, engine: Engine, points: list[Point], host: list[dict[str, Any]]) -> Report:
    rows = [point.row(arm) for point in points for arm in point.samples]
    ratios, caches = _ratio_rows(points), _cache_rows(points)
    notes = [f"\n{format_table(table)}\n" for table in (ratios, caches) if table]
    notes += [f"The host's work for a decode step\n{format_table(host)}", *NOTES, ""] if host else []
    notes += [
        f"TTFT, ITL in ms: medians of {args.rounds} rounds, spread (largest - smallest) / median of tok/s.",
        f"good: first token within {args.ttft_limit_ms:g} ms and 99 % of later ones within {args.itl_limit_ms:g} ms.",
    ]
    if engine.carrier is not None:
        notes.append(f"HTTP: {engine.carrier}, clients in a process of their own.")
    parallel, model = engine.runner.parallel, engine.files.model_config
    data = {
        "goals": "G8",
        "model": model_name(engine.config.model),
        "layers": model.num_hidden_layers,
        "world": {"tp": parallel.tp, "ep": parallel.ep},
        "settings": settings(args) | {"max_model_len": engine.runner.max_model_len},
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
    title = f"Serving under load ({args.trace}): {model_name(engine.config.model)}, {model.num_hidden_layers} layers"
    return Report(title, rows, notes, data)
