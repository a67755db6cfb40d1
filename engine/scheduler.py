"""Decides which tokens of which requests a step computes. Pure Python; the same on every rank for the same input."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_cache import KVCacheManager
from engine.request import Request


class ScheduledRequest(NamedTuple):
    """Tokens [start, start + num_tokens) of one request. `samples` where they reach its last token at that time; then
    up to num_guesses guesses of the tokens after it are verified. While a step before is in flight, `start` is the
    least that it can be: that step's accepted guesses come on top. num_known: guesses that the request has.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_guesses: int = 0
    num_known: int = 0

    @classmethod
    def next_of(
        cls, request: Request, num_tokens: int, num_guesses: int = 0, num_known: int | None = None
    ) -> ScheduledRequest:
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens
        return cls(request, start, num_tokens, samples, num_guesses, num_guesses if num_known is None else num_known)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_guesses


class GuessPlan(NamedTuple):
    """How many guesses of each request a step verifies at most, and how many it makes for the step after."""

    num_verify: int = 0
    num_propose: int = 0


NO_GUESSES = GuessPlan()
MANY_PREFILLS = 8  # no more are begun before those ahead are done, since all hold blocks for their whole prompt
MOST_RESTORED = 64  # blocks that come from the host in a step in which others decode, who wait for them
_ALIGNED_BLOCKS = 4  # a chunk of so many blocks ends with one, so that others may go on from there
_LINE = operator.attrgetter("rank_in_line")


@dataclass
class SchedulerOutput:
    """`launched` once the scheduler plans as if the step had been computed. Before it computes, the blocks of `saves`
    (block, slot) are copied to the host, then those of `restores` (slot, block) from there."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_preempted: int = 0
    launched: bool = False
    plan: GuessPlan = NO_GUESSES
    saves: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Rows of the step, guesses included."""
        return sum(s.num_rows for s in self.scheduled)


class Scheduler:
    """Continuous batching with chunked prefill, by priority, and first come first served within one.

    Requests that decode come first, so that a long prompt never stalls them; what is left of the token budget prefills.
    Half of that belongs to the first in line; the other half to the prompts with the least left to do, so that a short
    one need not wait for a long one. A request is admitted only when its whole prompt fits the free blocks. When blocks
    run out while decoding, the last in line of those that run gives its blocks back and is computed again later.
    """

    def __init__(self, kv_cache: KVCacheManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.kv_cache = kv_cache
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Request] = []  # in line, as those that run
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._lacks_blocks = False
        self._num_arrivals = 0
        self._requests: dict[str, Request] = {}
        self._num_needing_tokens = 0

    def add(self, request: Request) -> None:
        """Raises ValueError for an id in use, or for a request that the whole cache could not hold to its end: it would
        wait for ever. Its last token is never computed."""
        if request.longest > self.kv_cache.max_tokens:
            raise ValueError(
                f"request {request.request_id} needs room for {request.longest} tokens, but the KV cache holds "
                f"{self.kv_cache.max_tokens}."
            )
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already here.")
        self._requests[request.request_id] = request
        self._num_needing_tokens += request.params.needs_known_tokens
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        insort(self.waiting, request, key=_LINE)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def is_held_up(self) -> bool:
        """Whether the first in line waits for blocks rather than for a seat."""
        return self._lacks_blocks and bool(self.waiting)

    @property
    def needs_known_tokens(self) -> bool:
        """No step may run ahead of the tokens of the one before it: a request's penalties or grammar need them all
        before the next step's logits, and guesses in flight leave open where a step that is not decodes alone has its
        rows."""
        if self._num_needing_tokens:
            return True
        if not self.has_guesses_in_flight:
            return False
        return bool(self.waiting) or any(_is_prefilling(r) or r.params.shapes_logits for r in self.running)

    @property
    def has_guesses_in_flight(self) -> bool:
        """Guesses that are being verified, or made: where a request has its next rows, and what they hold, is known to
        the device alone."""
        return any(r.num_pending and (r.num_pending_guesses or r.num_guessed) for r in self.running)

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
        self._num_needing_tokens -= request.params.needs_known_tokens
        self.kv_cache.free(request)
        for line in (self.running, self.waiting):
            if _take_out(line, request):
                return

    def schedule(self, plan: GuessPlan = NO_GUESSES, prefill_limit: int | None = None) -> SchedulerOutput:
        """The next step's work; takes the blocks it needs. `plan` holds for requests that decode; where some do, at
        most `prefill_limit` tokens (at least 1) of others are prefilled beside them."""
        output = SchedulerOutput(plan=plan)
        prefilling = [r for r in self.running if _is_prefilling(r)]
        budget = self._schedule_decodes(output, bool(prefilling), self.max_num_batched_tokens)
        if output.scheduled and prefill_limit is not None:
            budget = min(budget, max(prefill_limit, 1))
        prefilling = [r for r in prefilling if r.block_ids]  # those that have not lost their place
        self._lacks_blocks = bool(output.num_preempted)
        if not output.num_preempted:
            self._admit(prefilling, budget, MOST_RESTORED if output.scheduled else None)
        self._schedule_prefills(output, prefilling, budget)
        if output.scheduled:
            output.saves, output.restores = self.kv_cache.host.take_copies()
        return output

    def _schedule_decodes(self, output: SchedulerOutput, prefills_wait: bool, budget: int) -> int:
        """Only decodes can need blocks: a prompt got all of its own when it was admitted."""
        decoding = [r for r in self.running if r.num_tokens - r.num_computed_tokens == 1 and not r.ends_in_flight]
        decoding = [r for r in decoding[:budget] if self._make_room(r, r.num_computed_tokens + 1, output)]
        budget -= len(decoding)
        spare = budget // 2 if prefills_wait or self.waiting else budget  # guesses never stall a prompt
        for request in decoding:
            known = request.num_guessed if request.num_pending else len(request.guess_ids)
            most = 0 if output.num_preempted else min(output.plan.num_verify, known, spare)
            num_guesses = self._num_guesses(request, most, output.plan)
            output.scheduled.append(ScheduledRequest.next_of(request, 1, num_guesses, known))
            spare, budget = spare - num_guesses, budget - num_guesses
        return budget

    def _admit(self, prefilling: list[Request], budget: int, most_restored: int | None) -> None:
        """Those that wait, in line, while some of the budget is left, and a few more: a short one may overtake.
        most_restored: blocks that may come from the host for one of them."""
        wanted = sum(map(_num_left, prefilling))
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            if wanted >= budget and len(prefilling) >= MANY_PREFILLS:
                return
            request = self.waiting[0]
            if not self.kv_cache.admit(request, most_restored):
                self._lacks_blocks = True
                return
            del self.waiting[0]
            insort(self.running, request, key=_LINE)
            prefilling.append(request)
            wanted += _num_left(request)

    def _schedule_prefills(self, output: SchedulerOutput, prefilling: list[Request], budget: int) -> None:
        """Each first takes over what others have computed of its prompt, those before it in this step included: prompts
        with a common beginning compute it once, together."""
        if not prefilling:
            return
        first, *others = sorted(prefilling, key=_LINE)
        others.sort(key=_num_left)
        kept = min(budget // 2, sum(map(_num_left, others)))
        for request in (first, *others):
            self.kv_cache.catch_up(request)
            num_tokens = self._chunk(request, budget - kept if request is first else budget)
            if num_tokens:
                item = ScheduledRequest.next_of(request, num_tokens)
                self.kv_cache.name_blocks(request, item.stop)
                output.scheduled.append(item)
                budget -= num_tokens

    def _chunk(self, request: Request, budget: int) -> int:
        num_tokens = min(_num_left(request), budget)
        stop = request.num_computed_tokens + num_tokens
        block_size = self.kv_cache.block_size
        if stop < request.num_tokens and num_tokens >= _ALIGNED_BLOCKS * block_size:
            num_tokens -= stop % block_size
        return num_tokens

    def _num_guesses(self, request: Request, most: int, plan: GuessPlan) -> int:
        """Guesses to verify, and blocks for them and for the draft's own chain after them, if there are some left.

        Guesses without a slot are not verified."""
        count = max(min(most, request.max_tokens - request.num_output_tokens - 1), 0)
        ahead = request.num_pending_guesses + count + max(plan.num_propose - 1, 0)
        self.kv_cache.grow(request, min(request.num_computed_tokens + 1 + ahead, request.longest))
        room = len(request.block_ids) * self.kv_cache.block_size - request.num_computed_tokens - 1
        return min(count, room)

    def _make_room(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """Grows the request, preempting from the back; False if it has given way itself."""
        if output.num_preempted and request not in self.running:
            return False
        num_tokens = min(num_tokens + request.num_pending_guesses, max(request.longest, num_tokens))
        while not self.kv_cache.grow(request, num_tokens):
            victim = self.running[-1]  # not among those scheduled already, which stand before this one
            self._preempt(victim)
            output.num_preempted += 1
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.kv_cache.free(request)
        request.num_computed_tokens = 0
        request.guess_ids, request.num_guessed = [], 0
        request.num_preemptions += 1
        _take_out(self.running, request)
        insort(self.waiting, request, key=_LINE)
        self.num_preemptions += 1

    def start_over(self) -> None:
        """A step was planned, but not all of it computed: blocks may lack what they are known by. So none is found any
        more, and all requests are computed again."""
        for request in self.running[::-1]:
            self._preempt(request)
        self.kv_cache.flush()

    def launch(self, output: SchedulerOutput) -> None:
        """From now on plans as if the step were done; the tokens that it samples are pending until `update`."""
        output.launched = True
        for item in output.scheduled:
            item.request.num_computed_tokens = item.stop
            item.request.num_pending += item.samples
            item.request.num_pending_guesses += output.plan.num_verify if item.samples else 0
            item.request.num_guessed = output.plan.num_propose if item.samples else 0

    def update(
        self, output: SchedulerOutput, committed: list[list[int]], guesses: list[list[int]] | None = None
    ) -> None:
        """Takes the tokens that each request that `samples` commits, in order, and the guesses of those after.

        Steps are updated in the order in which they were launched. A request that ended meanwhile drops its tokens.
        """
        if not output.launched:
            self.launch(output)
        sampling = [item for item in output.scheduled if item.samples]
        for item, token_ids, guess_ids in zip(sampling, committed, guesses or [[]] * len(sampling), strict=True):
            if not item.request.finished:
                item.request.num_pending_guesses -= output.plan.num_verify
                self._take(item, token_ids, guess_ids)

    def _take(self, item: ScheduledRequest, token_ids: list[int], guess_ids: list[int]) -> None:
        request = item.request
        request.num_draft_tokens += item.num_guesses
        request.num_accepted_tokens += min(len(request.commit(token_ids)), len(token_ids) - 1, item.num_guesses)
        self.kv_cache.name_blocks(request, request.num_tokens - request.num_pending - 1)  # all but the newest is there
        if request.finished:
            self._remove(request)
        elif request.num_computed_tokens >= item.stop:  # it has not lost its blocks since
            request.num_computed_tokens += len(token_ids) - 1
            request.guess_ids = guess_ids


def _is_prefilling(request: Request) -> bool:
    return _num_left(request) > 1


def _num_left(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


def _take_out(line: list[Request], request: Request) -> bool:
    """Whether it stood there."""
    index = bisect_left(line, request.rank_in_line, key=_LINE)
    if index == len(line) or line[index] is not request:
        return False
    del line[index]
    return True
