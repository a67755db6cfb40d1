"""`GET /metrics`: one snapshot of the engine in Prometheus' text format. A further group is a function in `_GROUPS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from engine.expert_load import ExpertLoad
from engine.server.context import ServerContext
from engine.server.info import EXPERT_LOAD_SECONDS
from engine.stats import Distribution, EngineStats, SpeculationSnapshot

PREFIX = "turnout_"


class Text(Response):
    media_type = CONTENT_TYPE_LATEST


class EngineCollector(Collector):
    """The metric families of one snapshot; `load` is None where experts are not counted. rejected: calls by reason;
    parse_errors: tool calls by reason."""

    def __init__(
        self,
        stats: EngineStats,
        load: ExpertLoad | None,
        rejected: Mapping[str, int],
        parse_errors: Mapping[str, int],
    ):
        self._stats, self._load, self._rejected, self._parse_errors = stats, load, rejected, parse_errors

    def collect(self) -> Iterator[Metric]:
        for group in _GROUPS:
            yield from group(self._stats)
        yield _by_reason("request_rejected", "Calls refused because of load or a shutdown.", self._rejected)
        unread = "Tool calls in answers that could not be read and were passed on as text."
        yield _by_reason("tool_call_parse_errors", unread, self._parse_errors)
        if self._load is not None:
            yield from _experts(self._load)


async def metrics(request: Request) -> Response:
    """Counters and gauges of the engine, for Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    client = ServerContext.of(request).client
    registry.register(EngineCollector(*await client.ask(_snapshot), client.rejected, client.parse_errors))
    return Text(generate_latest(registry))


def _snapshot(core: Any) -> tuple[EngineStats, ExpertLoad | None]:
    return core.stats(), core.expert_load(EXPERT_LOAD_SECONDS) if core.counts_experts else None


def _requests(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("num_requests_running", "Answers being generated.", stats.num_running)
    yield _gauge("num_requests_waiting", "Answers waiting for room to begin, or to go on.", stats.num_waiting)
    yield _gauge("kv_cache_usage_ratio", "Share of the KV cache's blocks that requests hold.", stats.kv_cache_usage)
    yield _by_reason("request_finished", "Answers that ended; a request with n > 1 has n of them.", stats.num_finished)


def _kv_cache(stats: EngineStats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        f"{PREFIX}kv_cache_blocks",
        "Blocks of the KV cache: free, cached (kept in case a prompt begins like them) and held by requests.",
        labels=["state"],
    )
    for state, count in stats.kv_cache_blocks.items():
        blocks.add_metric([state], count)
    yield blocks
    looked_for = "Prompt tokens looked for in the prefix cache, once for each of a request's n answers."
    yield _counter("prefix_cache_query_tokens", looked_for, stats.num_query_tokens)
    yield _counter("prefix_cache_hit_tokens", "Prompt tokens found there.", stats.num_hit_tokens)
    yield _gauge("kv_offload_blocks", "Cold blocks that the host's memory keeps on a rank.", stats.num_host_blocks)
    yield _counter("kv_offload_restored_blocks", "Blocks brought back from there.", stats.num_restored_blocks)


def _work(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("steps", "Steps of the model.", stats.num_steps)
    yield _histogram("iteration_tokens_total", "Tokens of a step that was read, guesses included.", stats.step_tokens)
    yield _counter("prompt_tokens", "Tokens of accepted prompts.", stats.num_prompt_tokens)
    yield _counter("generation_tokens", "Tokens generated.", stats.num_generated_tokens)
    yield _counter(
        "num_preemptions", "Times a request lost its KV blocks and was computed again.", stats.num_preemptions
    )


def _step_budget(stats: EngineStats) -> Iterator[Metric]:
    budget = stats.step_budget
    if budget is None:
        return
    if budget.limit_tokens is not None:
        yield _gauge(
            "prefill_limit_tokens", "Prompt tokens of a step beside requests that decode.", budget.limit_tokens
        )
    yield _gauge("prefill_step_predicted_seconds", "Expected of the last such step.", budget.predicted_seconds)
    yield _gauge("prefill_step_seconds", "What the last such step that was read took.", budget.observed_seconds)


def _latencies(stats: EngineStats) -> Iterator[Metric]:
    for name, help_text, values in (
        ("time_to_first_token", "From a request's arrival to its first token.", stats.time_to_first_token),
        ("inter_token_latency", "Between two steps that gave an answer tokens.", stats.inter_token_latency),
        ("e2e_request_latency", "From a request's arrival to the end of its answer.", stats.e2e_latency),
        ("request_queue_time", "From a request's arrival to its first step.", stats.queue_time),
        ("request_prefill_time", "From a request's first step to its first token.", stats.prefill_time),
        ("request_decode_time", "From an answer's first token to its last.", stats.decode_time),
    ):
        yield _histogram(f"{name}_seconds", help_text, values)


def _communication(stats: EngineStats) -> Iterator[Metric]:
    estimated = (
        "Seconds in communication: on CPU ranks by the clock, in replayed steps estimated from the latencies measured "
        "at start. Absent where nothing was measured."
    )
    for name, help_text, values in (
        ("comm_rounds", "Communication rounds of rank 0, replayed steps included.", stats.comm_rounds),
        ("comm_bytes", "Bytes that rank 0 sent.", stats.comm_bytes),
        ("comm_seconds", estimated, stats.comm_seconds),
    ):
        family = CounterMetricFamily(f"{PREFIX}{name}", help_text, labels=["kind"])
        for kind, value in values.items():
            family.add_metric([kind], value)
        if values:
            yield family


def _dispatchers(stats: EngineStats) -> Iterator[Metric]:
    """What was measured at start, and which of it is in use."""
    choice = stats.comm_choice
    if not choice:
        return
    info = InfoMetricFamily(
        f"{PREFIX}moe_comm",
        "The dispatcher in use for steps of up to so many rows, and the microseconds of a layer's rounds measured.",
        labels=["rows", "dispatcher"],
    )
    for rows, name in choice["chosen"].items():
        measured = choice["microseconds"].get(rows, {}).get(name)
        info.add_metric([str(rows), name], {} if measured is None else {"microseconds": f"{measured:.2f}"})
    yield info
    latencies = GaugeMetricFamily(
        f"{PREFIX}moe_comm_microseconds",
        "Microseconds of a layer's communication rounds, measured at start.",
        labels=["rows", "dispatcher"],
    )
    for rows, by_name in choice["microseconds"].items():
        for name, value in by_name.items():
            latencies.add_metric([str(rows), name], value)
    if latencies.samples:
        yield latencies


def _speculation(stats: EngineStats) -> Iterator[Metric]:
    """Absent without a draft."""
    spec = stats.speculation
    if spec is None:
        return
    for name, help_text, value in (
        ("verify_steps", "Decode steps that verified guesses.", spec.num_verify_steps),
        ("num_drafts", "Chains of guesses verified, one for each request in a verify step.", spec.num_drafts),
        ("num_proposed_tokens", "Guesses made, those never verified with them.", spec.num_proposed_tokens),
        ("num_draft_tokens", "Guesses verified.", spec.num_draft_tokens),
        ("num_accepted_tokens", "Guesses accepted.", spec.num_accepted_tokens),
    ):
        yield _counter(f"spec_decode_{name}", help_text, value)
    by_position = CounterMetricFamily(
        f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
        "Guesses accepted, by their place in the chain.",
        labels=["position"],
    )
    for position, count in enumerate(spec.num_accepted_by_position):
        by_position.add_metric([str(position)], count)
    yield by_position
    yield _histogram(
        "spec_decode_accept_length", "Tokens that a verify step committed for a request.", spec.accept_length
    )
    yield from _draft_choices(spec)


def _draft_choices(spec: SpeculationSnapshot) -> Iterator[Metric]:
    """How many guesses are verified now, and why; what steps cost."""
    info = InfoMetricFamily(
        f"{PREFIX}spec_decode_choice",
        "Guesses that the last step of up to so many requests verified, and why.",
        labels=["bucket", "num_drafts", "reason"],
    )
    for bucket, choice in spec.choices.items():
        info.add_metric([str(bucket), str(choice.num_drafts), choice.code], {})
    costs = GaugeMetricFamily(
        f"{PREFIX}spec_decode_step_seconds",
        "Seconds of a steady decode step of up to so many requests that verifies so many guesses and makes as many.",
        labels=["bucket", "num_drafts"],
    )
    for bucket, by_drafts in spec.step_seconds.items():
        for num_drafts, seconds in by_drafts.items():
            costs.add_metric([str(bucket), str(num_drafts)], seconds)
    yield from (family for family in (info, costs) if family.samples)


def _experts(load: ExpertLoad) -> Iterator[Metric]:
    if load.rank_imbalance_ratio is not None:
        yield _gauge(
            "moe_rank_imbalance_ratio",
            "Routed tokens of the busiest rank over the mean of all, averaged over layers, since the start; 1 is even.",
            load.rank_imbalance_ratio,
        )


_GROUPS = (_requests, _kv_cache, _work, _step_budget, _latencies, _communication, _dispatchers, _speculation)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}{name}", help_text, value=value)


def _by_reason(name: str, help_text: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}{name}", help_text, labels=["reason"])
    for reason, count in counts.items():
        family.add_metric([reason], count)
    return family


def _histogram(name: str, help_text: str, values: Distribution) -> Metric:
    buckets, so_far = [], 0
    for bound, count in zip((*values.bounds, float("inf")), values.counts, strict=True):
        so_far += count
        buckets.append((floatToGoString(bound), so_far))
    return HistogramMetricFamily(f"{PREFIX}{name}", help_text, buckets=buckets, sum_value=values.total)
