"""The engine of one process: the same scheduler and runner on every rank, and rank 0's side of it.

A step is: tell the other ranks what changed, schedule, execute, take the tokens, show them. Where steps overlap, the
tokens taken are those of the step before, so that the device never waits for the host.
"""

from __future__ import annotations

import itertools
import operator
import random
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from engine.cache_plan import BLOCK_SIZE
from engine.comm.control import ControlServer
from engine.comm.step_watch import StepDigest
from engine.config import EngineConfig
from engine.expert_load import ExpertLoad
from engine.kv_cache import KVCacheManager
from engine.model_files import SAMPLING_DEFAULTS, ModelFiles
from engine.model_runner import ModelRunner
from engine.output_processor import OutputProcessor
from engine.request import CompletionDelta, EngineDeadError, InvalidRequestError, Request, SamplingParams
from engine.scheduler import NO_GUESSES, GuessPlan, Scheduler, SchedulerOutput
from engine.speculation import Speculation
from engine.stats import EngineStats
from engine.step_output import ModelRunnerOutput

_LAST_WORDS_SECONDS = 1.0


class Replica:
    """What every rank holds: given the same messages in the same order, all ranks compute the same.

    With `overlap` a step is planned and launched before the tokens of the one before are read: a request that turns
    out to have ended has then computed one token too many, which is dropped. Answers are the same either way.
    """

    def __init__(self, config: EngineConfig, runner: ModelRunner, overlap: bool = False):
        self.runner, self.overlap = runner, overlap
        self.num_steps = 0
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._launched = SchedulerOutput()
        kv_cache = KVCacheManager(runner.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(kv_cache, config.max_num_seqs, config.max_num_batched_tokens)

    def apply(self, new: list[Request], finish: list[list[Any]]) -> None:
        """finish: [request id, reason, stop reason] each. What ends goes first, since its id may be used again."""
        for request_id, reason, stop_reason in finish:
            self.scheduler.finish(request_id, reason, stop_reason)
        for request in new:
            self.scheduler.add(request)

    def step_as_told(self, message: dict[str, Any]) -> StepDigest:
        """What another rank does with rank 0's "step" frame."""
        self.apply([Request.from_dict(r) for r in message["new"]], message["finish"])
        return self.digest(self.step(GuessPlan(*message["plan"]))[1])

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self, plan: GuessPlan = NO_GUESSES) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Launches what can be launched; returns the oldest step in flight with its tokens, or an empty one."""
        self._launched = SchedulerOutput()
        ahead = 1 if self.overlap and self._may_run_ahead() else 0
        if len(self._in_flight) > ahead:
            return self._read()
        output = self.scheduler.schedule(plan)
        if output.scheduled:
            result = self.runner.execute(output)
            self.scheduler.launch(output)
            self.num_steps += 1
            self._in_flight.append((output, result))
            self._launched = output
            ahead = 1 if self.overlap and self._may_run_ahead() else 0  # which the step's guesses may have changed
        if len(self._in_flight) > (ahead if output.scheduled else 0):
            return self._read()
        return SchedulerOutput(), ModelRunnerOutput()

    def _may_run_ahead(self) -> bool:
        """Only a graph takes from the device how many guesses the step before it accepts."""
        scheduler = self.scheduler
        if scheduler.needs_known_tokens:
            return False
        return not scheduler.has_guesses_in_flight or self.runner.replays(len(scheduler.running))

    def digest(self, result: ModelRunnerOutput) -> StepDigest:
        """What the last `step`, which returned `result`, has in common with that of all ranks."""
        launched = self._launched
        told = array("q")
        for token_ids in result.token_ids:
            told.extend([len(token_ids), *token_ids])
        checksum = zlib.crc32(told.tobytes())
        return StepDigest(len(launched.scheduled), launched.num_tokens, checksum)

    def _read(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Waits for a step's tokens. Leaves out requests that ended while it ran: their ids may be in use again."""
        output, result = self._in_flight[0]
        result.read()
        if (reason := self.runner.failure()) is not None:  # what was read is not to be trusted
            raise RuntimeError(reason)
        self._in_flight.popleft()
        live = [not item.request.finished for item in output.scheduled]
        self.scheduler.update(output, result.token_ids, result.guess_ids)
        return (output, result) if all(live) else _only(live, output, result)


def _only(
    live: list[bool], output: SchedulerOutput, result: ModelRunnerOutput
) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """The part of a step that concerns the live of its requests."""
    sampling = [alive for item, alive in zip(output.scheduled, live, strict=True) if item.samples]
    items = [item for item, alive in zip(output.scheduled, live, strict=True) if alive]
    ids = {item.request.request_id for item in items}
    return replace(output, scheduled=items), ModelRunnerOutput(
        token_ids=list(itertools.compress(result.token_ids, sampling)),
        guess_ids=list(itertools.compress(result.guess_ids, sampling)),
        matched=list(itertools.compress(result.matched, sampling)),
        logprobs={key: value for key, value in result.logprobs.items() if key in ids},
        prompt_logprobs={key: value for key, value in result.prompt_logprobs.items() if key in ids},
    )


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
        self._eos_token_ids = files.eos_token_ids
        self._control = control
        self._on_shutdown = on_shutdown
        self._outputs = OutputProcessor(self.tokenizer)
        self._random = random.Random(config.seed)
        self._new: list[Request] = []
        self._finish: list[list[Any]] = []
        self._aborted: list[CompletionDelta] = []
        self._failure: str | None = None
        self._expert_load: tuple[float, ExpertLoad | None] = 0.0, None
        self._num_prompt_tokens = self._num_generated_tokens = 0

    def validate(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raises InvalidRequestError for a request that can never be served."""
        params.check_vocab(self.vocab_size)
        if not len(prompt_token_ids):
            raise InvalidRequestError("the prompt is empty; give at least one token.", param="prompt")
        bad = next((t for t in _plain_ids(prompt_token_ids) if not 0 <= t < self.vocab_size), None)
        if bad is not None:
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

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queues n sequences. Raises InvalidRequestError as `validate` does, ValueError for an id in use."""
        self.validate(prompt_token_ids, params)
        prompt = _plain_ids(prompt_token_ids)
        ids = [request_id] if params.n == 1 else [f"{request_id}#{index}" for index in range(params.n)]
        if self._outputs.sequence_ids(request_id) or any(map(self._outputs.knows, ids)):
            raise ValueError(f"request {request_id} is already running.")
        room = self.max_model_len - len(prompt)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
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
            self._aborted.append(self._outputs.abort(sequence_id))
            queued = next((r for r in self._new if r.request_id == sequence_id), None)
            if queued is not None:
                self._new.remove(queued)
            else:
                self._finish.append([sequence_id, "abort", None])

    def unfinished_ids(self) -> list[str]:
        return self._outputs.request_ids()

    def has_unfinished(self) -> bool:
        return bool(self._new or self._finish or self._aborted or self.replica.has_unfinished)

    def step(self) -> list[CompletionDelta]:
        """Raises EngineDeadError once a rank has failed."""
        self._check_alive()
        new, finish, deltas = self._new, self._finish, self._aborted
        self._new, self._finish, self._aborted = [], [], []
        try:
            output, result = self._lead_step(new, finish)
            if self._speculation is not None:
                self._speculation.observe(output, result)
                self._speculation.forget(sequence_id for sequence_id, *_ in finish)
            deltas += self._outputs.process(output, result)
        except Exception as error:
            # A collective that broke because a rank died is not the cause; the rank's own word arrives a moment later.
            self._failure = self._control.wait_for_failure(_LAST_WORDS_SECONDS) if self._control is not None else None
            if self._failure is not None:
                raise EngineDeadError(self._failure) from None
            self._fail(str(error) if isinstance(error, EngineDeadError) else _words(error))
            raise EngineDeadError(self._failure) from error
        except BaseException:
            if self._control is not None:
                self._fail("a step was interrupted, so the ranks no longer agree; start a new engine.")
            raise
        self._finish += [[sequence_id, "stop", stop] for sequence_id, stop in self._outputs.take_stopped()]
        if self._speculation is not None and not self.has_unfinished():
            self._speculation.pause()
        self._num_generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def _lead_step(self, new: list[Request], finish: list[list[Any]]) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The step of all ranks; the watch over it never makes it wait."""
        plan = self._plan(new)
        if self._control is None:
            self.replica.apply(new, finish)
            return self.replica.step(plan)
        digest = None
        self._control.begin_step({"kind": "step", "new": [r.to_dict() for r in new], "finish": finish, "plan": plan})
        try:
            self.replica.apply(new, finish)
            output, result = self.replica.step(plan)
            digest = self.replica.digest(result)
        finally:
            self._control.end_step(digest)
        return output, result

    def _plan(self, new: list[Request]) -> GuessPlan:
        """How much the next step guesses; what it depends on is known to rank 0 alone."""
        return NO_GUESSES if self._speculation is None else self._speculation.plan(self.replica.scheduler.running, new)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        if self._control is not None:
            self._control.fail(reason)

    def stats(self) -> EngineStats:
        scheduler, runner, answers = self.replica.scheduler, self.replica.runner, self._outputs.stats
        meter = runner.parallel.meter
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._new),
            kv_cache_usage=scheduler.kv_cache.usage,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.replica.num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_finished=dict(answers.finished),
            time_to_first_token=answers.time_to_first_token.snapshot(),
            inter_token_latency=answers.inter_token_latency.snapshot(),
            e2e_latency=answers.e2e_latency.snapshot(),
            comm_rounds=dict(meter.rounds),
            comm_bytes=dict(meter.bytes),
            comm_seconds=dict(meter.seconds),
            comm_choice=runner.comm_choice(),
            speculation=None if self._speculation is None else self._speculation.snapshot(),
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
        try:
            if self._control is None or not runner.gathers_expert_counts:
                return runner.expert_load()
            self._control.begin_step({"kind": "expert_load"})
            try:
                return runner.expert_load()
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


def _words(error: BaseException) -> str:
    return f"rank 0 failed: {type(error).__name__}: {error}"


def _plain_ids(prompt_token_ids: Iterable[Any]) -> list[int]:
    """Token ids as Python's own integers, which every rank can read: arrays and their elements are taken too."""
    try:
        return [operator.index(t) for t in prompt_token_ids]
    except TypeError as error:
        raise InvalidRequestError(f"the prompt must be token ids ({error}).", param="prompt") from None


def _wrap_int64(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
