"""Rank 0's side of the engine: takes requests, leads the steps of all ranks, shows tokens.

A step is: tell the other ranks what changed, schedule, execute, take the tokens, show them. Where steps overlap, the
tokens taken are those of the step before, so that the device never waits for the host.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from engine.attention.backend import AttentionBackend
from engine.comm.control import ControlServer
from engine.config import EngineConfig
from engine.deadlines import Deadlines
from engine.errors import EngineDeadError, InvalidRequestError
from engine.expert_load import ExpertLoad
from engine.model_files import SAMPLING_DEFAULTS, ModelFiles
from engine.model_runner import ModelRunner
from engine.output_processor import OutputProcessor
from engine.replica import Replica
from engine.request import CompletionDelta, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import NO_GUESSES, GuessPlan, SchedulerOutput
from engine.speculation import Speculation
from engine.stats import STEP_TOKEN_BOUNDS, EngineStats, Histogram
from engine.step_budget import StepBudget
from engine.step_output import ModelRunnerOutput
from engine.structured_outputs import StructuredOutputs

_LAST_WORDS_SECONDS = 1.0


class EngineCore:
    """Rank 0: takes requests, leads the other ranks, shows tokens. One thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        runner: ModelRunner,
        control: ControlServer | None = None,
        on_shutdown: Callable[[], None] = lambda: None,
    ):
        self.config = config
        self.tokenizer, self.chat_template = files.tokenizer, files.chat_template
        self.generation_defaults = {k: v for k, v in files.generation_config.items() if k in SAMPLING_DEFAULTS}
        self.model_name = files.directory.name
        self.max_model_len = runner.max_model_len
        self.vocab_size = files.model_config.vocab_size
        self.replica = Replica(config, runner, runner.overlaps)
        self._speculation = Speculation(runner, config.adaptive_draft_tokens) if runner.num_guesses else None
        self._step_budget = None
        if config.longest_step is not None:
            self._step_budget = StepBudget(
                config.longest_step,
                config.max_num_batched_tokens,
                runner.prefill_times,
                _most_absorbed(runner.model.backend),
            )
        self._eos_token_ids = files.eos_token_ids
        self._control = control
        self._on_shutdown = on_shutdown
        self._outputs = OutputProcessor(self.tokenizer, Deadlines(config.queue_timeout, config.request_timeout))
        self._random = random.Random(config.seed)
        self._new: list[Request] = []
        self._finish: list[list[Any]] = []
        self._ended: list[CompletionDelta] = []
        self._failure: str | None = None
        self._expert_load: tuple[float, ExpertLoad | None] = 0.0, None
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._step_tokens = Histogram(STEP_TOKEN_BOUNDS)

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError for a request that can never be served."""
        params.check_vocab(self.vocab_size)
        if params.structured_outputs is not None:
            self.check_structured_outputs(params.structured_outputs)
        if not len(prompt_token_ids):
            raise InvalidRequestError("the prompt is empty; give at least one token.", param="prompt")
        prompt = _plain_ids(prompt_token_ids)
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(t for t in prompt if not 0 <= t < self.vocab_size)
            raise InvalidRequestError(
                f"the prompt holds token id {bad}, but the vocabulary has {self.vocab_size} entries.", param="prompt"
            )
        if len(prompt_token_ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {len(prompt_token_ids)} tokens, but the context holds {self.max_model_len} including "
                "at least one generated token; shorten the prompt.",
                param="prompt",
                code="context_length_exceeded",
            )

    def check_structured_outputs(self, structured: StructuredOutputs) -> None:
        """Raises InvalidRequestError for one that no answer can match, or that is too large or hard to compile.

        Any thread may call it. It takes up to a quarter of a second the first time; a caller that must not wait in
        `validate` or `add_request` calls it before them.
        """
        self.replica.runner.grammars.check(structured)

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queues n sequences. Raises InvalidRequestError as `validate` does, ValueError for an id in use."""
        self.validate(prompt_token_ids, params)
        prompt = _plain_ids(prompt_token_ids)
        ids = [request_id] if params.n == 1 else [f"{request_id}#{index}" for index in range(params.n)]
        if self._outputs.sequence_ids(request_id) or any(map(self._outputs.knows, ids)):
            raise ValueError(f"request {request_id} is already running.")
        room = self.max_model_len - len(prompt)
        ignores_eos = params.ignore_eos and params.structured_outputs is None  # a grammar that is over ends its answer
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else self._eos_token_ids)
        for index, sequence_id in enumerate(ids):
            request = Request(
                request_id=sequence_id,
                prompt_token_ids=list(prompt),
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                seed=self._random.getrandbits(63) if params.seed is None else _wrap_int64(params.seed + index),
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_token_ids=stop_ids,
            )
            self._new.append(request)
            self._outputs.add(request_id, index, request, time.monotonic())
        self._num_prompt_tokens += len(prompt)

    def abort_request(self, request_id: str) -> None:
        """Ends a request and frees its blocks at the next step; an unknown id is ignored."""
        for sequence_id in self._outputs.sequence_ids(request_id):
            self._end(sequence_id, self._outputs.abort(sequence_id))

    def _time_out(self, now: float) -> None:
        for sequence_id, delta in self._outputs.time_out(now):
            self._end(sequence_id, delta)

    def _end(self, sequence_id: str, delta: CompletionDelta) -> None:
        """Tells the caller now and the ranks with the next step, if they know of the sequence."""
        self._ended.append(delta)
        queued = next((r for r in self._new if r.request_id == sequence_id), None)
        if queued is not None:
            self._new.remove(queued)
        else:
            self._finish.append([sequence_id, delta.finish_reason, None])

    @property
    def num_unbegun(self) -> int:
        """Answers that have not had their first step."""
        return self._outputs.num_unbegun

    @property
    def num_begun(self) -> int:
        """Answers that have had it, since the start."""
        return self._outputs.num_begun

    @property
    def num_seats(self) -> int:
        """Answers that a step has room for."""
        return self.replica.scheduler.max_num_seqs

    @property
    def num_free_seats(self) -> int:
        """Answers that may begin beside those that have; none while one that could is kept waiting, by memory."""
        if self.replica.scheduler.is_held_up:
            return 0
        return max(self.num_seats - self._outputs.num_going_on, 0)

    def unfinished_ids(self) -> list[str]:
        return self._outputs.request_ids()

    def has_unfinished(self) -> bool:
        return bool(self._new or self._finish or self._ended or self.replica.has_unfinished)

    def step(self) -> list[CompletionDelta]:
        """Raises EngineDeadError once a rank has failed."""
        self._check_alive()
        now = time.monotonic()
        self._time_out(now)
        new, finish, deltas = self._new, self._finish, self._ended
        self._new, self._finish, self._ended = [], [], []
        try:
            output, result = self._lead_step(new, finish)
            if self._step_budget is not None:
                ahead = self.replica.launched if self.replica.is_ahead else None
                self._step_budget.observe(self.replica.was_read, ahead, self.replica.waited)
            if self._speculation is not None:
                self._speculation.observe(output, result)
                self._speculation.forget(sequence_id for sequence_id, *_ in finish)
            if output.scheduled:
                self._step_tokens.observe(output.num_tokens)
            self._outputs.begin(self.replica.launched, now)
            deltas += self._outputs.process(output, result)
        except Exception as error:
            # A collective that broke because a rank died is not the cause; the rank's own word arrives a moment later.
            self._failure = self._control.wait_for_failure(_LAST_WORDS_SECONDS) if self._control is not None else None
            if self._failure is not None:
                raise EngineDeadError(self._failure) from None
            self._fail(str(error) if isinstance(error, EngineDeadError) else _words(error))
            raise EngineDeadError(self._failure) from error
        except BaseException:
            self._ended = deltas  # of which nobody has heard
            if self._control is not None:
                self._fail("a step was interrupted, so the ranks no longer agree; start a new engine.")
            raise
        self._finish += [[sequence_id, "stop", stop] for sequence_id, stop in self._outputs.take_stopped()]
        if not self.has_unfinished():
            for part in filter(None, (self._speculation, self._step_budget)):
                part.pause()
        self._num_generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def _lead_step(self, new: list[Request], finish: list[list[Any]]) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The step of all ranks; the watch over it never makes it wait. What has ended makes room first, so that the
        plan knows who may take its place."""
        self.replica.apply(new, finish)
        plan = self._plan(new)
        prefill_limit = self._prefill_limit(plan)
        if self._control is None:
            return self.replica.step(plan, prefill_limit)
        digest = None
        message = {"new": [r.to_dict() for r in new], "finish": finish, "plan": plan, "prefill_limit": prefill_limit}
        self._control.begin_step({"kind": "step"} | message)
        try:
            output, result = self.replica.step(plan, prefill_limit)
            digest = self.replica.digest(result)
        finally:
            self._control.end_step(digest)
        return output, result

    def _plan(self, new: list[Request]) -> GuessPlan:
        """How much the next step guesses; what it depends on is known to rank 0 alone."""
        return NO_GUESSES if self._speculation is None else self._speculation.plan(self.replica.scheduler.running, new)

    def _prefill_limit(self, plan: GuessPlan) -> int | None:
        """Prompt tokens of the next step beside those that decode; None for no bound but the token budget."""
        if self._step_budget is None:
            return None
        return self._step_budget.limit(self.replica.scheduler, plan)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        if self._control is not None:
            self._control.fail(reason)

    def stats(self) -> EngineStats:
        scheduler, runner, answers = self.replica.scheduler, self.replica.runner, self._outputs.stats
        kv_cache, meter = scheduler.kv_cache, runner.parallel.meter
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._new),
            kv_cache_usage=kv_cache.usage,
            kv_cache_blocks={"free": kv_cache.num_free, "cached": kv_cache.num_cached, "held": kv_cache.num_held},
            num_query_tokens=kv_cache.query_tokens,
            num_hit_tokens=kv_cache.hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.replica.num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_finished=dict(answers.finished),
            time_to_first_token=answers.time_to_first_token.snapshot(),
            inter_token_latency=answers.inter_token_latency.snapshot(),
            e2e_latency=answers.e2e_latency.snapshot(),
            queue_time=answers.queue_time.snapshot(),
            prefill_time=answers.prefill_time.snapshot(),
            decode_time=answers.decode_time.snapshot(),
            comm_rounds=dict(meter.rounds),
            comm_bytes=dict(meter.bytes),
            comm_seconds=dict(meter.seconds),
            comm_choice=runner.comm_choice(),
            num_host_blocks=len(kv_cache.host),
            num_restored_blocks=kv_cache.host.num_restored,
            speculation=None if self._speculation is None else self._speculation.snapshot(),
            step_budget=None if self._step_budget is None else self._step_budget.snapshot(),
            step_tokens=self._step_tokens.snapshot(),
        )

    @property
    def counts_experts(self) -> bool:
        return self.config.expert_load

    def expert_load(self, max_age: float = 0.0) -> ExpertLoad:
        """The load up to the last step launched, or one read at most `max_age` seconds ago.

        Raises InvalidRequestError where the engine does not count, EngineDeadError once a rank has failed.
        """
        if not self.counts_experts:
            raise InvalidRequestError("this engine does not count experts; start it with expert_load on.")
        self._check_alive()
        read_at, load = self._expert_load
        if load is None or time.monotonic() - read_at > max_age:
            load = self._read_expert_load()
            self._expert_load = time.monotonic(), load
        return load

    def _read_expert_load(self) -> ExpertLoad:
        runner = self.replica.runner
        return self._between_steps("expert_load" if runner.gathers_expert_counts else None, runner.expert_load)

    def flush_prefix_cache(self) -> None:
        """No request after this finds what those before it have computed.

        Raises EngineDeadError once a rank has failed.
        """
        self._check_alive()
        self._between_steps("flush", self.replica.scheduler.kv_cache.flush)

    def _between_steps(self, kind: str | None, function: Callable[[], Any]) -> Any:
        """What `function` returns, while the other ranks do what `kind` tells them, if it tells them anything."""
        try:
            if self._control is None or kind is None:
                return function()
            self._control.begin_step({"kind": kind})
            try:
                return function()
            finally:
                self._control.end_step()
        except BaseException as error:
            reason = self._control.wait_for_failure(_LAST_WORDS_SECONDS) if self._control is not None else None
            self._fail(reason or _words(error))
            if isinstance(error, Exception):
                raise EngineDeadError(self._failure) from (None if reason else error)
            raise

    def return_to_ranks(self, value: list[dict]) -> None:
        """Ends the other ranks' present call under torchrun, where every rank runs the caller's script."""
        if self._control is not None:
            self._control.broadcast({"kind": "return", "value": value})

    def shutdown(self) -> None:
        """Ends the other ranks and waits for them."""
        self._on_shutdown()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Calls back, from another thread, when a rank fails, also while no step runs."""
        if self._control is not None:
            self._control.on_failure = callback

    @property
    def failure(self) -> str | None:
        """Why the engine cannot go on, or None."""
        return self._failure or (self._control.failure if self._control is not None else None)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineDeadError(self.failure)


def _most_absorbed(backend: AttentionBackend) -> int | None:
    """Tokens of a chunk whose attention reads the cache as it is; None: of any."""
    most = backend.max_absorbed_query_len
    return None if most is None else max(most, backend.most_cut_queries)


def _words(error: BaseException) -> str:
    return f"rank 0 failed: {type(error).__name__}: {error}"


def _plain_ids(prompt_token_ids: Iterable[Any]) -> list[int]:
    """Token ids as Python's own integers, which every rank can read: arrays and their elements are taken too."""
    try:
        return list(map(operator.index, prompt_token_ids))
    except TypeError as error:
        raise InvalidRequestError(f"the prompt must be token ids ({error}).", param="prompt") from None


def _wrap_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
