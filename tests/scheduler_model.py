"""A scheduler under test together with what a model would do: a simulated KV cache and tokens told by their place.

`ScheduledWorld.step` checks every invariant of one step; `drain` runs to the end and checks that nothing is left.
"""

from __future__ import annotations

from engine.kv_cache import KVCacheManager
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerOutput


def make_request(name: str, prompt_len: int, max_tokens: int) -> Request:
    prompt = [1000 * (hash_of(name) % 97) + p for p in range(prompt_len)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), seed=0, max_tokens=max_tokens)


def hash_of(name: str) -> int:
    return sum(ord(c) * 31**i for i, c in enumerate(name))


def token_at(name: str, position: int) -> int:
    """The token that the simulated model says at a position: another for every request and place."""
    return 10**6 + 1000 * (hash_of(name) % 997) + position


class ScheduledWorld:
    """One scheduler, a twin fed with the same input, and a cache that remembers who wrote which slot."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_size, self.max_num_seqs, self.budget = block_size, max_num_seqs, max_num_batched_tokens
        self.schedulers = [
            Scheduler(KVCacheManager(num_blocks, block_size), max_num_seqs, max_num_batched_tokens) for _ in range(2)
        ]
        self.scheduler = self.schedulers[0]
        self.cache: dict[tuple[int, int], tuple[str, int, int]] = {}
        self.arrivals: dict[str, int] = {}
        self.limits: dict[str, tuple[int, int]] = {}
        self.finished: dict[str, list[int]] = {}

    @property
    def max_tokens(self) -> int:
        return self.scheduler.kv_cache.max_tokens

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        for scheduler in self.schedulers:
            scheduler.add(make_request(name, prompt_len, max_tokens))
        self.arrivals[name] = len(self.arrivals)
        self.limits[name] = (prompt_len, max_tokens)

    def end(self, name: str, reason: str = "abort") -> None:
        for scheduler in self.schedulers:
            request = scheduler.finish(name, reason)
            assert request is not None and request.block_ids == [] and request.finish_reason == reason
            assert scheduler.get(name) is None
        self.check_blocks()

    def step(self) -> SchedulerOutput:
        unfinished = sorted([*self.scheduler.running, *self.scheduler.waiting], key=self._arrival)
        decoding = [r for r in self.scheduler.running if r.num_tokens - r.num_computed_tokens == 1]
        output = self.scheduler.schedule()
        self.check_blocks()
        self._check_limits(output)
        scheduled = [item.request for item in output.scheduled]
        if unfinished:
            assert unfinished[0] in scheduled, "the oldest request makes progress in every step"
        for request in decoding:
            assert request in scheduled or request in self.scheduler.waiting, "a prefill never stalls a decode"
        tokens = [self._compute(item) for item in output.scheduled]
        sampled = [t for t in tokens if t is not None]
        self._check_twin(output, sampled)
        for request in self.scheduler.update(output, sampled):
            assert request.request_id not in self.finished and request.finished
            self.finished[request.request_id] = request.output_token_ids
            self._check_answer(request.request_id)
        self.check_blocks()
        return output

    def drain(self) -> None:
        most = sum(prompt_len + max_tokens for prompt_len, max_tokens in self.limits.values()) + 1
        for _ in range(most):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert not self.scheduler.has_unfinished, f"unfinished after {most} steps"
        assert self.scheduler.kv_cache.usage == 0.0
        assert not self.scheduler.running and not self.scheduler.waiting

    def check_blocks(self) -> None:
        """No block leaked, shared, freed twice, or the one that belongs to no one; waiting requests hold none."""
        pool = self.scheduler.kv_cache.pool
        held = [b for r in self.scheduler.running for b in r.block_ids]
        assert sorted(held + list(pool._free)) == list(range(1, pool.num_blocks))
        assert all(not r.block_ids and r.num_computed_tokens == 0 for r in self.scheduler.waiting)
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        assert [self._arrival(r) for r in queue] == sorted(map(self._arrival, queue)), "first come, first served"
        assert {r.request_id for r in queue} == self.scheduler._requests.keys()

    def _arrival(self, request: Request) -> int:
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
            assert len(request.block_ids) * self.block_size >= item.stop

    def _compute(self, item) -> int | None:
        """Writes the tokens' slots, then reads back all that attention would read."""
        request = item.request
        for position in range(item.start, item.stop):
            token = request.token_ids(position, position + 1)[0]
            self.cache[self._slot(request, position)] = (request.request_id, position, token)
        for position in range(item.stop):
            token = request.token_ids(position, position + 1)[0]
            assert self.cache[self._slot(request, position)] == (request.request_id, position, token)
        return token_at(request.request_id, item.stop) if item.samples else None

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size

    def _check_twin(self, output: SchedulerOutput, sampled: list[int]) -> None:
        def shape(o: SchedulerOutput) -> list:
            return [(i.request.request_id, i.start, i.num_tokens, i.samples, i.request.block_ids) for i in o.scheduled]

        twin = self.schedulers[1]
        other = twin.schedule()
        assert shape(other) == shape(output) and other.num_preempted == output.num_preempted
        twin.update(other, sampled)

    def _check_answer(self, name: str) -> None:
        prompt_len, max_tokens = self.limits[name]
        assert self.finished[name] == [token_at(name, prompt_len + i) for i in range(max_tokens)]
