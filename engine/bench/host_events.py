"""What an event of a stream costs the server: a core that says words on a clock, the real server, clients elsewhere."""

from __future__ import annotations

import time
from typing import Any

from engine.bench import traces
from engine.bench.serve_arms import ClientProcess, http_server
from engine.bench.serve_load import Load
from engine.bench.serve_stats import percentile
from engine.request import CompletionDelta, RequestMetrics
from engine.sampling_params import SamplingParams

_TOKENS = 200
_WORD, _WORD_ID = " word", 300
_PERIOD = {1: 0.004}  # streams -> seconds a step
_LONG_PERIOD = 0.02


class PacedCore:
    """Has the face of an EngineCore. Each step gives every request one word, `period` seconds after the one before."""

    chat_template, failure, generation_defaults, model_name = None, None, {}, "bench"
    num_unbegun = num_begun = 0
    num_seats = num_free_seats = 1024

    def __init__(self, config: Any, tokenizer: Any, period: float):
        self.config, self.tokenizer, self._period = config, tokenizer, period
        self.max_model_len, self.vocab_size = 2**20, tokenizer.vocab_size
        self._left: dict[str, int] = {}
        self._next = 0.0
        self.late: list[float] = []
        self.cpu_seconds = 0.0  # of the thread that steps
        self.num_events = 0

    def on_failure(self, callback: Any) -> None:
        """It never fails."""

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Takes everything."""

    def check_structured_outputs(self, structured: Any) -> None:
        """Takes everything."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._left[request_id] = params.max_tokens

    def abort_request(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self._left)

    def shutdown(self) -> None:
        self.cpu_seconds = time.thread_time()

    def step(self) -> list[CompletionDelta]:
        self._next = max(self._next + self._period, time.perf_counter())
        time.sleep(max(self._next - time.perf_counter(), 0.0))
        self.late.append(time.perf_counter() - self._next)
        deltas = [self._word(request_id) for request_id in list(self._left)]
        self.num_events += len(deltas)
        self.cpu_seconds = time.thread_time()
        return deltas

    def _word(self, request_id: str) -> CompletionDelta:
        self._left[request_id] -= 1
        if self._left[request_id]:
            return CompletionDelta(request_id, 0, _WORD, [_WORD_ID])
        del self._left[request_id]
        return CompletionDelta(request_id, 0, _WORD, [_WORD_ID], finish_reason="length", metrics=RequestMetrics())


def measure_events(config: Any, tokenizer: Any, streams: int, num_tokens: int = _TOKENS) -> dict[str, Any]:
    """A row for so many streams at a time, each of `num_tokens` events."""
    core = PacedCore(config, tokenizer, _PERIOD.get(streams, _LONG_PERIOD))
    clients = ClientProcess()
    try:
        with http_server(core) as (port, carrier):
            for count in (8, num_tokens):  # the first warms up
                cpu, thread, events, core.late = time.process_time(), core.cpu_seconds, core.num_events, []
                records = clients.run(port, Load(traces.fixed(streams, 8, count, 1000, seed=0), concurrency=streams))
            events = core.num_events - events
            cpu = time.process_time() - cpu - (core.cpu_seconds - thread)
            late = list(core.late)
    finally:
        clients.close()
    return {
        "streams": streams,
        "us an event": cpu / events * 1e6,
        "us a step": cpu / events * streams * 1e6,
        "merged": 1 - sum(len(record.times) for record in records) / events,
        "late us p50": percentile(late, 50) * 1e6,
        "late us p99": percentile(late, 99) * 1e6,
        "HTTP": carrier,
    }
