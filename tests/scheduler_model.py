"""A scheduler under test together with what a model would do: a simulated device and tokens told by their place.

`ScheduledWorld.step` checks every invariant of one step; `drain` runs to the end and checks that nothing is left.
"""

from __future__ import annotations

from collections import Counter, deque

from engine.kv_cache import KVCacheManager
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import NO_GUESSES, GuessPlan, Scheduler, SchedulerOutput
from tests.simulated_device import SimulatedDevice, Told


def make_request(name: str, prompt_len: int, max_tokens: int, shared: int = 0, **params) -> Request:
    """The first `shared` tokens of its prompt are those of all that share so many."""
    prompt = [p if p < shared else 1000 * (hash_of(name) % 97) + p for p in range(prompt_len)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **params), seed=0, max_tokens=max_tokens)


def hash_of(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name))


def token_at(name: str, position: int) -> int:
    """The token that the simulated model says at a position: another for every request and place."""
    return 10**6 + 1000 * (hash_of(name) % 997) + position


class Side:
    """One scheduler and the device that runs its steps."""

    def __init__(self, scheduler: Scheduler, device: SimulatedDevice):
        self.scheduler, self.device = scheduler, device
        self.in_flight: deque[tuple[SchedulerOutput, Told]] = deque()

    @property
    def may_run_ahead(self) -> bool:
        """As a Replica decides it."""
        if self.scheduler.needs_known_tokens:
            return False
        return self.device.replays or not self.scheduler.has_guesses_in_flight

    def launch(self, output: SchedulerOutput) -> None:
        self.in_flight.append((output, self.device.run(output)))
        self.scheduler.launch(output)

    def read(self) -> SchedulerOutput:
        output, told = self.in_flight.popleft()
        self.scheduler.update(output, *told)
        return output


class ScheduledWorld:
    """One scheduler, and a twin fed with the same input. `replays`: as SimulatedDevice has it. `lookahead`: as
    KVCacheManager has it, 1 where the device has a draft."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        replays: bool = True,
        lookahead: int = 1,
        caching: bool = True,
        host_blocks: int = 0,
    ):
        self.block_size, self.max_num_seqs, self.budget = block_size, max_num_seqs, max_num_batched_tokens
        self.side, self.twin = (
            Side(
                Scheduler(
                    KVCacheManager(num_blocks, block_size, caching, lookahead, host_blocks),
                    max_num_seqs,
                    max_num_batched_tokens,
                ),
                SimulatedDevice(block_size, token_at, replays, has_draft=lookahead > 0),
            )
            for _ in range(2)
        )
        self.scheduler = self.side.scheduler
        self.arrivals: dict[str, tuple[int, int]] = {}
        self.limits: dict[str, tuple[int, int]] = {}
        self.finished: dict[str, list[int]] = {}
        self.ahead = 0
        self.was_flushed = False

    @property
    def max_tokens(self) -> int:
        return self.scheduler.kv_cache.max_tokens

    def add(self, name: str, prompt_len: int, max_tokens: int, shared: int = 0, priority: int = 0, **params) -> None:
        for side in (self.side, self.twin):
            side.scheduler.add(make_request(name, prompt_len, max_tokens, shared, priority=priority, **params))
        self.arrivals[name] = (priority, len(self.arrivals))
        self.limits[name] = (prompt_len, max_tokens)

    def end(self, name: str, reason: str = "abort") -> None:
        for side in (self.side, self.twin):
            request = side.scheduler.finish(name, reason)
            assert request is not None and request.block_ids == [] and request.finish_reason == reason
            assert side.scheduler.get(name) is None
        self.check_blocks()

    def flush(self) -> None:
        for side in (self.side, self.twin):
            side.scheduler.kv_cache.flush()
        self.was_flushed = True
        self.check_blocks()
        assert self.scheduler.kv_cache.num_cached == 0

    def step(
        self, plan: GuessPlan = NO_GUESSES, ahead: bool = False, prefill_limit: int | None = None
    ) -> SchedulerOutput:
        """Plans and launches a step. `ahead`: leaves its tokens unread, and launches it before those of the one before
        are read where that may be done."""
        if not (ahead and self.side.may_run_ahead):
            self.read(0)
        else:
            self.ahead += bool(self.side.in_flight)
        decoding = [r for r in self.scheduler.running if _decodes(r)]
        output = self.scheduler.schedule(plan, prefill_limit)
        self.check_blocks()
        self._check_prefill_limit(output, prefill_limit, decoding)
        self._check_limits(output)
        scheduled = [item.request for item in output.scheduled]
        line = [r for r in self.scheduler.running if not r.ends_in_flight]
        assert scheduled or self.side.in_flight or not self.scheduler.has_unfinished, "something is always done"
        assert not line or line[0] in scheduled, "the first in line makes progress in every step"
        for request in decoding:
            assert request in scheduled or request in self.scheduler.waiting, "a prefill never stalls a decode"
        self._check_progress(output, decoding)
        self._launch(output, prefill_limit)
        self.read(1 if ahead and output.scheduled else 0)
        return output

    def _check_progress(self, output: SchedulerOutput, decoding: list[Request]) -> None:
        prefilling = [r for r in self.scheduler.running if r.num_tokens - r.num_computed_tokens > 1]
        if prefilling and any(item.num_guesses for item in output.scheduled):
            assert any(item.request not in decoding for item in output.scheduled), "guesses never stall all prompts"

    def _check_prefill_limit(self, output: SchedulerOutput, limit: int | None, decoding: list[Request]) -> None:
        prompt_tokens = sum(item.num_tokens for item in output.scheduled if item.request not in decoding)
        if any(item.request in decoding for item in output.scheduled) and limit is not None:
            assert prompt_tokens <= max(limit, 1)

    def _launch(self, output: SchedulerOutput, prefill_limit: int | None) -> None:
        other = self.twin.scheduler.schedule(output.plan, prefill_limit)
        assert _shape(other) == _shape(output) and other.num_preempted == output.num_preempted
        self.side.launch(output)
        self.twin.launch(other)

    def read(self, depth: int) -> None:
        """Takes tokens until `depth` steps are in flight, and checks what is told of each request."""
        while len(self.side.in_flight) > depth:
            items = self.side.in_flight[0][0].scheduled
            running = [item.request for item in items if not item.request.finished]
            assert self.side.read().plan == self.twin.read().plan
            for request in running:
                self._check_tokens(request)
            self.check_blocks()

    def drain(self, plan: GuessPlan = NO_GUESSES, ahead: bool = False) -> None:
        most = sum(prompt_len + max_tokens for prompt_len, max_tokens in self.limits.values()) + 1
        for _ in range(2 * most):
            if not self.scheduler.has_unfinished:
                break
            self.step(plan, ahead)
        self.read(0)
        assert not self.scheduler.has_unfinished, f"unfinished after {most} steps"
        assert self.scheduler.kv_cache.usage == 0.0
        assert not self.scheduler.running and not self.scheduler.waiting

    def check_blocks(self) -> None:
        """No block leaked, freed twice, or the one that belongs to no one; shared only by those whose tokens it holds;
        waiting requests hold none."""
        pool = self.scheduler.kv_cache.pool
        held = Counter(b for r in self.scheduler.running for b in r.block_ids)
        assert all(pool.num_holders(block) == held[block] for block in range(pool.num_blocks))
        assert sorted([*held, *pool._empty, *pool._idle]) == list(range(1, pool.num_blocks))
        kv_cache = self.scheduler.kv_cache
        assert kv_cache.num_held == len(held)
        assert kv_cache.num_free + kv_cache.num_cached + kv_cache.num_held == pool.num_usable
        assert {d: b for b, d in enumerate(pool._digests) if d is not None} == pool._blocks
        assert all(pool._digests[b] is not None for b in pool._idle)
        assert self.was_flushed or all(pool._digests[b] is not None for b, count in held.items() if count > 1)
        assert all(not r.block_ids and r.num_computed_tokens == 0 for r in self.scheduler.waiting)
        self._check_lines()

    def _check_lines(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        for line in (running, waiting):
            assert [self._arrival(r) for r in line] == sorted(map(self._arrival, line))
        for priority in {r.params.priority for r in waiting}:
            line = [self._arrival(r) for r in (*running, *waiting) if r.params.priority == priority]
            assert line == sorted(line), "first come, first served"
        assert {r.request_id for r in (*running, *waiting)} == self.scheduler._requests.keys()

    def _arrival(self, request: Request) -> tuple[int, int]:
        return self.arrivals[request.request_id]

    def _check_limits(self, output: SchedulerOutput) -> None:
        items = output.scheduled
        assert output.num_tokens <= self.budget
        assert len(items) <= len(self.scheduler.running) <= self.max_num_seqs
        assert len({item.request.request_id for item in items}) == len(items)
        for item in items:
            request = item.request
            assert item.num_tokens >= 1 and item.start == request.num_computed_tokens
            assert item.stop <= request.num_tokens
            assert item.samples == (item.stop == request.num_tokens)
            assert 0 <= item.num_guesses <= output.plan.num_verify and (item.samples or not item.num_guesses)
            assert item.stop + item.num_guesses <= max(request.longest, item.stop)
            assert len(request.block_ids) * self.block_size >= item.stop
            assert len(request.block_ids) * self.block_size < max(request.longest, item.stop) + self.block_size

    def _check_tokens(self, request: Request) -> None:
        """Exactly those of the model, in order, never more than asked for; ended when all are there."""
        name = request.request_id
        prompt_len, max_tokens = self.limits[name]
        told = request.output_token_ids
        assert told == [token_at(name, prompt_len + i) for i in range(len(told))] and len(told) <= max_tokens
        assert request.finished == (len(told) == max_tokens)
        assert 0 <= request.num_accepted_tokens <= request.num_draft_tokens
        if request.finished:
            assert name not in self.finished and request.block_ids == []
            self.finished[name] = told


def _decodes(request: Request) -> bool:
    return request.num_tokens - request.num_computed_tokens == 1 and not request.ends_in_flight


def _shape(output: SchedulerOutput) -> list:
    return [(i.request.request_id, *i[1:], i.request.block_ids, i.request.guess_ids) for i in output.scheduled]
