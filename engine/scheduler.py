"""Decides which tokens of which requests a step computes. Pure Python; the same on every rank for the same input."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_cache import KVCacheManager
from engine.request import Request


class ScheduledRequest(NamedTuple):
    """Tokens [start, start + num_tokens) of one request. `samples` where they reach its last token at that time."""

    request: Request
    start: int
    num_tokens: int
    samples: bool

    @classmethod
    def next_of(cls, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return cls(request, start, num_tokens, start + num_tokens == request.num_tokens)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


@dataclass
class SchedulerOutput:
    """`launched` once the scheduler plans as if the step had been computed."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_preempted: int = 0
    launched: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    Running requests come first, so that a long prompt never stalls them; what is left of the token budget prefills.
    A request is admitted only when its whole prompt fits the free blocks. When blocks run out while decoding, the
    request admitted last gives its blocks back and is computed again later.
    """

    def __init__(self, kv_cache: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.kv_cache = kv_cache
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._requests: dict[str, Request] = {}
        self._num_penalized = 0

    def add(self, request: Request) -> None:
        """Raises ValueError for an id in use, or for a request that the whole cache could not hold to its end: it would
        wait for ever. Its last token is never computed."""
        longest = len(request.prompt_token_ids) + request.max_tokens - 1
        if longest > self.kv_cache.max_tokens:
            raise ValueError(
                f"request {request.request_id} needs room for {longest} tokens, but the KV cache holds "
                f"{self.kv_cache.max_tokens}."
            )
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already here.")
        self._requests[request.request_id] = request
        self._num_penalized += request.params.has_penalties
        self.waiting.append(request)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def needs_known_tokens(self) -> bool:
        """A request's penalties need all tokens before the next step's logits, so no step may run ahead."""
        return self._num_penalized > 0

    def finish(self, request_id: str, reason: str, stop_reason: str | int | None = None) -> Request | None:
        """Ends a request from outside: a stop string, an abort. Unknown or finished ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason, request.stop_reason = reason, stop_reason
        self._remove(request)
        return request

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._num_penalized -= request.params.has_penalties
        self.kv_cache.free(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> SchedulerOutput:
        """The next step's work; takes the blocks it needs."""
        output = SchedulerOutput()
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        self._schedule_waiting(output, budget)
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Decodes before prefills. Only decodes can need blocks: a prompt got all of its own when it was admitted."""
        decoding, prefilling = [], []
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:
                prefilling.append((request, left))
            elif left == 1 and not request.ends_in_flight:
                decoding.append((request, left))
        for request, left in decoding + prefilling:
            num_tokens = min(left, budget)
            if num_tokens and self._make_room(request, request.num_computed_tokens + num_tokens, output):
                output.scheduled.append(ScheduledRequest.next_of(request, num_tokens))
                budget -= num_tokens
        return budget

    def _make_room(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Grows the request, preempting from the back; False if it has given way itself."""
        if output.num_preempted and request not in self.running:
            return False
        while not self.kv_cache.grow(request, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            output.num_preempted += 1
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not output.num_preempted:
            request = self.waiting[0]
            if not self.kv_cache.grow(request, request.num_tokens):
                return
            self.waiting.popleft()
            self.running.append(request)
            num_tokens = min(request.num_tokens, budget)
            output.scheduled.append(ScheduledRequest.next_of(request, num_tokens))
            budget -= num_tokens

    def launch(self, output: SchedulerOutput) -> None:
        """From now on plans as if the step were done; the tokens that it samples are pending until `update`."""
        output.launched = True
        for item in output.scheduled:
            item.request.num_computed_tokens = item.stop
            item.request.num_pending += item.samples

    def update(self, output: SchedulerOutput, sampled: list[int]) -> list[Request]:
        """Takes one sampled token for each scheduled request that `samples`, in order. Returns those that finished.

        Steps are updated in the order in which they were launched. A request that ended meanwhile drops its token.
        """
        if not output.launched:
            self.launch(output)
        tokens = iter(sampled)
        finished = []
        for item in output.scheduled:
            request = item.request
            if item.samples:
                token_id = next(tokens)
                if request.finished:
                    continue
                request.append(token_id)
                if request.finished:
                    finished.append(request)
        for request in finished:
            self._remove(request)
        return finished
