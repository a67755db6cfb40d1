"""Turns sampled tokens into what callers see: text, stop strings, log-probabilities, times. Lives on rank 0."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.deadlines import Deadlines
from engine.request import CompletionDelta, Logprob, Request, RequestMetrics
from engine.sampling import SampledLogprobs
from engine.scheduler import SchedulerOutput
from engine.stats import AnswerStats
from engine.step_output import ModelRunnerOutput, PromptLogprobs
from engine.stop_strings import StopStrings
from engine.tokenizer import IncrementalDecoder, Tokenizer


@dataclass
class _Sequence:
    """One of the n answers of a caller's request while it runs."""

    parent_id: str
    index: int
    request: Request
    decoder: IncrementalDecoder
    stops: StopStrings
    arrival: float
    begun: float | None = None
    first_token: float | None = None
    num_shown: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_logprobs_sent: bool = False
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


class OutputProcessor:
    """Knows every running sequence. `process` also reports which of them met a stop string."""

    def __init__(self, tokenizer: Tokenizer, deadlines: Deadlines | None = None):
        self.tokenizer = tokenizer
        self.stats = AnswerStats()
        self.num_begun = 0
        self._deadlines = deadlines or Deadlines()
        self._unbegun: set[str] = set()
        self._sequences: dict[str, _Sequence] = {}
        self._stopped: list[tuple[str, str]] = []

    def add(self, parent_id: str, index: int, request: Request, arrival: float) -> None:
        params = request.params
        self._sequences[request.request_id] = _Sequence(
            parent_id,
            index,
            request,
            IncrementalDecoder(self.tokenizer, params.skip_special_tokens),
            StopStrings(params.stop, params.include_stop_str_in_output),
            arrival,
            prompt_logprobs=None if params.prompt_logprobs is None or index else [None],
        )
        self._unbegun.add(request.request_id)
        self._deadlines.add(request.request_id, arrival)

    @property
    def num_unbegun(self) -> int:
        """Sequences that have not had their first step."""
        return len(self._unbegun)

    @property
    def num_going_on(self) -> int:
        """Sequences that have had it and have not ended, preempted ones with them."""
        return len(self._sequences) - len(self._unbegun)

    def begin(self, launched: SchedulerOutput, now: float) -> None:
        """Called when a step has been launched, with the time at which it was planned."""
        if not self._unbegun:
            return
        for item in launched.scheduled:
            sequence_id = item.request.request_id
            if sequence_id in self._unbegun:
                self._unbegun.remove(sequence_id)
                self._deadlines.begin(sequence_id)
                self.num_begun += 1
                sequence = self._sequences[sequence_id]
                sequence.begun = now
                self.stats.queue_time.observe(now - sequence.arrival)

    def sequence_ids(self, parent_id: str) -> list[str]:
        return [key for key, s in self._sequences.items() if s.parent_id == parent_id]

    def knows(self, sequence_id: str) -> bool:
        return sequence_id in self._sequences

    def request_ids(self) -> list[str]:
        """The callers' requests that still run."""
        return list(dict.fromkeys(s.parent_id for s in self._sequences.values()))

    def process(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[CompletionDelta]:
        """Called after the scheduler took the tokens; one delta for each sequence that got some."""
        now = time.monotonic()
        deltas = []
        for item in output.scheduled:
            sequence = self._sequences[item.request.request_id]
            self._take_prompt_logprobs(sequence, result.prompt_logprobs.get(item.request.request_id))
            if item.samples:
                logprobs = result.logprobs.get(item.request.request_id)
                deltas.append(self._delta(sequence, logprobs, now))
        return deltas

    def take_stopped(self) -> list[tuple[str, str]]:
        """(sequence id, stop string) of those that a stop string ended while the scheduler still runs them."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def abort(self, sequence_id: str) -> CompletionDelta | None:
        sequence = self._forget(sequence_id)
        if sequence is None:
            return None
        self.stats.finish("abort")
        return CompletionDelta(
            sequence.parent_id, sequence.index, "", [], finish_reason="abort", metrics=sequence.metrics
        )

    def time_out(self, now: float) -> list[tuple[str, CompletionDelta]]:
        """Ends what is past its time: sequence ids, and the deltas that say so, with the text held back so far."""
        ended = []
        for sequence_id, reason in self._deadlines.take_due(now):
            sequence = self._forget(sequence_id)
            self.stats.finish("timeout", now - sequence.arrival)
            text = sequence.stops.push(sequence.decoder.finish(), may_stop=False) + sequence.stops.flush()
            place = (sequence.parent_id, sequence.index)
            end = {"finish_reason": "timeout", "stop_reason": reason, "metrics": sequence.metrics}
            ended.append((sequence_id, CompletionDelta(*place, text, [], **end)))
        return ended

    def _forget(self, sequence_id: str) -> _Sequence | None:
        self._unbegun.discard(sequence_id)
        self._deadlines.end(sequence_id)
        return self._sequences.pop(sequence_id, None)

    def _delta(self, sequence: _Sequence, logprobs: SampledLogprobs | None, now: float) -> CompletionDelta:
        """Of the request's newest tokens: those that a step committed, or fewer where one of them ended it."""
        request = sequence.request
        token_ids, text = self._texts(sequence)
        reason, stop_reason = request.finish_reason, request.stop_reason
        if sequence.stops.matched is not None:
            reason, stop_reason = "stop", sequence.stops.matched
        is_first = sequence.first_token is None
        self._clock(sequence, now)
        self._count_guesses(sequence, len(token_ids))
        if reason is not None:
            self.stats.finish(reason, now - sequence.arrival)
            self.stats.decode_time.observe(sequence.metrics.decode_time)
            self._forget(request.request_id)
            if not request.finished:
                self._stopped.append((request.request_id, stop_reason))
        return CompletionDelta(
            sequence.parent_id,
            sequence.index,
            text,
            token_ids,
            self._token_logprobs(token_ids, logprobs) if logprobs else None,
            self._send_prompt_logprobs(sequence),
            reason,
            stop_reason,
            sequence.metrics if reason else None,
            sequence.metrics.num_cached_tokens if is_first else None,
        )

    def _count_guesses(self, sequence: _Sequence, num_shown: int) -> None:
        """Accepted ones are those among the tokens shown: none behind a stop string."""
        request, metrics = sequence.request, sequence.metrics
        metrics.num_draft_tokens = request.num_draft_tokens
        metrics.num_accepted_tokens += min(request.num_accepted_tokens - metrics.num_accepted_tokens, num_shown)

    def _texts(self, sequence: _Sequence) -> tuple[list[int], str]:
        """The tokens not shown yet, one after the other as if each had come alone, up to the one that completes a stop
        string, and their text."""
        output_ids = sequence.request.output_token_ids
        token_ids, text = [], ""
        for index in range(sequence.num_shown, len(output_ids)):
            token_ids.append(output_ids[index])
            text += self._text(sequence, index)
            if sequence.stops.matched is not None:
                break
        sequence.num_shown += len(token_ids)
        return token_ids, text

    def _text(self, sequence: _Sequence, index: int) -> str:
        """Of one output token. The one that ends a sequence is not part of its text unless the caller asked for it."""
        request, params = sequence.request, sequence.request.params
        is_end = request.finished and index == len(request.output_token_ids) - 1
        ended_by_token = is_end and request.finish_reason == "stop"
        text = ""
        if not ended_by_token or params.include_stop_str_in_output:
            text = sequence.decoder.push([request.output_token_ids[index]])
        if is_end:
            text += sequence.decoder.finish()
        text = sequence.stops.push(text, may_stop=index + 1 >= params.min_tokens)
        if is_end and sequence.stops.matched is None:
            text += sequence.stops.flush()
        return text

    def _clock(self, sequence: _Sequence, now: float) -> None:
        if sequence.first_token is None:
            sequence.first_token = now
            sequence.metrics.num_cached_tokens = sequence.request.num_cached_tokens
            sequence.metrics.ttft = now - sequence.arrival
            self.stats.time_to_first_token.observe(sequence.metrics.ttft)
            self.stats.prefill_time.observe(now - (sequence.arrival if sequence.begun is None else sequence.begun))
        else:
            self.stats.inter_token_latency.observe(now - sequence.first_token - sequence.metrics.decode_time)
        sequence.metrics.decode_time = now - sequence.first_token

    def _token_logprobs(self, token_ids: list[int], values: SampledLogprobs) -> list[dict[int, Logprob]]:
        """Of as many of the rows as there are tokens."""
        rows = zip(token_ids, values.chosen, values.ranks, values.top_ids, values.top_logprobs, strict=False)
        return [self._logprob_row(*row) for row in rows]

    def _logprob_row(
        self, token_id: int, chosen: float, rank: int, top_ids: list[int], top_logprobs: list[float]
    ) -> dict[int, Logprob]:
        row = {token_id: Logprob(chosen, rank, self._decode(token_id))}
        for place, (top_id, value) in enumerate(zip(top_ids, top_logprobs, strict=True), start=1):
            row.setdefault(top_id, Logprob(value, place, self._decode(top_id)))
        return row

    def _decode(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _take_prompt_logprobs(self, sequence: _Sequence, new: PromptLogprobs | None) -> None:
        """Appends what this chunk adds; a sequence computed again after preemption repeats what is already there."""
        have = sequence.prompt_logprobs
        if new is None or have is None:
            return
        token_ids = sequence.request.prompt_token_ids[new.first_position :][: len(new.values.chosen)]
        have.extend(self._token_logprobs(token_ids, new.values)[len(have) - new.first_position :])

    def _send_prompt_logprobs(self, sequence: _Sequence) -> list[dict[int, Logprob] | None] | None:
        if sequence.prompt_logprobs_sent or sequence.prompt_logprobs is None:
            return None
        sequence.prompt_logprobs_sent = True
        return sequence.prompt_logprobs
