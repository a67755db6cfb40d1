"""What every rank holds of the engine: the same scheduler and runner, fed with the same messages in the same order."""

from __future__ import annotations

import itertools
import time
import zlib
from array import array
from collections import deque
from dataclasses import replace
from typing import Any

from engine.cache_plan import BLOCK_SIZE
from engine.comm.step_watch import StepDigest
from engine.config import EngineConfig
from engine.kv_cache import KVCacheManager
from engine.model_runner import ModelRunner
from engine.request import Request
from engine.scheduler import NO_GUESSES, GuessPlan, Scheduler, SchedulerOutput
from engine.step_output import ModelRunnerOutput


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
        self._waited, self._was_read = 0.0, SchedulerOutput()
        self._was_interrupted = False
        lookahead = int(runner.num_guesses > 0)  # a draft's KV depends on the token after
        kv_cache = KVCacheManager(
            runner.num_blocks, BLOCK_SIZE, config.enable_prefix_caching, lookahead, runner.num_host_blocks
        )
        self.scheduler = Scheduler(kv_cache, config.max_num_seqs, config.max_num_batched_tokens)

    def apply(self, new: list[Request], finish: list[list[Any]]) -> None:
        """finish: [request id, reason, stop reason] each. What ends goes first, since its id may be used again."""
        for request_id, reason, stop_reason in finish:
            self.scheduler.finish(request_id, reason, stop_reason)
        for request in new:
            self.scheduler.add(request)
            if request.params.structured_outputs is not None:
                self.runner.grammars.expect(request)

    def step_as_told(self, message: dict[str, Any]) -> StepDigest:
        """What another rank does with rank 0's "step" frame."""
        self.apply([Request.from_dict(r) for r in message["new"]], message["finish"])
        return self.digest(self.step(GuessPlan(*message["plan"]), message["prefill_limit"])[1])

    @property
    def launched(self) -> SchedulerOutput:
        """What the last `step` launched, empty if nothing."""
        return self._launched

    @property
    def is_ahead(self) -> bool:
        """Whether a step is in flight whose tokens nobody has waited for yet."""
        return bool(self._in_flight)

    @property
    def was_read(self) -> SchedulerOutput:
        """What the last `step` read as it was launched, requests that have ended since included; empty if nothing."""
        return self._was_read

    @property
    def waited(self) -> float:
        """Seconds that the last read waited for the device."""
        return self._waited

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(
        self, plan: GuessPlan = NO_GUESSES, prefill_limit: int | None = None
    ) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """Launches what can be launched; returns the oldest step in flight with its tokens, or an empty one."""
        self._launched = self._was_read = SchedulerOutput()
        ahead = 1 if self._may_run_ahead() else 0
        if len(self._in_flight) > ahead:
            return self._read()
        self._was_interrupted = False
        try:
            output = self._launch(plan, prefill_limit)
        except Exception:
            raise  # after which there is no step
        except BaseException:
            self._was_interrupted = True
            self.scheduler.start_over()
            self.runner.grammars.start_over()
            raise
        if output.scheduled:
            ahead = 1 if self._may_run_ahead() else 0  # which the step's guesses may have changed
        if len(self._in_flight) > (ahead if output.scheduled else 0):
            return self._read()
        return SchedulerOutput(), ModelRunnerOutput()

    def _launch(self, plan: GuessPlan, prefill_limit: int | None) -> SchedulerOutput:
        output = self.scheduler.schedule(plan, prefill_limit)
        if output.scheduled:
            result = self.runner.execute(output)
            self.scheduler.launch(output)
            self.num_steps += 1
            self._in_flight.append((output, result))
            self._launched = output
        return output

    def _may_run_ahead(self) -> bool:
        """Only a graph takes from the device how many guesses the step before it accepts. What an interrupted step left
        there is no one's."""
        scheduler = self.scheduler
        if not self.overlap or self._was_interrupted or scheduler.needs_known_tokens:
            return False
        return not scheduler.has_guesses_in_flight or self.runner.replays(len(scheduler.running))

    def _judge(self, request: Request) -> None:
        """An answer that had to end before it was what it has to be ended in an error, its own alone."""
        if request.params.structured_outputs is None or request.finish_reason != "stop":
            return
        failure = self.runner.grammars.failure(request)
        if failure is not None:
            request.finish_reason, request.stop_reason = "error", failure

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
        began = time.monotonic()
        result.read()
        self._waited, self._was_read = time.monotonic() - began, output
        if (reason := self.runner.failure()) is not None:  # what was read is not to be trusted
            raise RuntimeError(reason)
        self._in_flight.popleft()
        live = [not item.request.finished for item in output.scheduled]
        self.scheduler.update(output, result.token_ids, result.guess_ids)
        for item in output.scheduled:
            self._judge(item.request)
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
