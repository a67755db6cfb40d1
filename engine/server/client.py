"""The bridge between asyncio and the engine core: one thread steps the core, requests and deltas cross over in batches.

The thread alone touches the core. Between two steps it drains an inbox of commands; with nothing to do it waits on a
condition, which a rank that fails meanwhile notifies too. Deltas enter the event loop once per step.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.errors import EngineDeadError, InvalidRequestError
from engine.request import CompletionDelta
from engine.sampling_params import SamplingParams
from engine.server.grammar_desk import GrammarDesk
from engine.server.output_parser import PARSE_ERRORS
from engine.server.queue_limit import WaitingLine
from engine.server.streams import Question, RequestStream, push_batch
from engine.version import __version__

logger = logging.getLogger("turnout.server")

STUCK_SECONDS = 4.0  # how long after a failure the core's thread is waited for


class Job(NamedTuple):
    """One prompt of a call; `request_id` must be unique. call_names: what `end_calls` knows the call by."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    call_names: frozenset[str] = frozenset()


@dataclass
class _Running:
    stream: RequestStream
    num_running: int
    call_names: frozenset[str]


class EngineClient:
    """Runs `core` in its own thread and serves any number of coroutines.

    `on_error` is called once, in the core thread, with the exception that ended the engine. `close` ends the thread
    and shuts the core down; requests still running then fail with EngineDeadError. At most `max_queued_requests`
    answers wait for a seat in the steps.
    """

    def __init__(
        self,
        core: Any,
        on_error: Callable[[BaseException], None] | None = None,
        max_queued_requests: int | None = None,
    ):
        self.tokenizer = core.tokenizer
        self.chat_template = core.chat_template
        self.model_name: str = core.model_name
        self.max_model_len: int = core.max_model_len
        self.vocab_size: int = core.vocab_size
        self.generation_defaults: dict[str, Any] = dict(core.generation_defaults)
        build = f"{__version__} {core.config!r}".encode()
        self.system_fingerprint = f"fp_{hashlib.sha256(build).hexdigest()[:12]}"
        self.grammar_desk = GrammarDesk(core.check_structured_outputs)
        self._core = core
        self._on_error = on_error
        self._inbox: deque[Callable[[], None]] = deque()
        self._work = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._refusal: Exception | None = None
        self._line = WaitingLine(max_queued_requests, core.num_seats)
        self._rejected = {"queue_timeout": 0, "draining": 0}
        self._parse_errors = dict.fromkeys(PARSE_ERRORS, 0)
        self._running: dict[str, _Running] = {}
        self._entering: dict[str, RequestStream] = {}
        self._questions: set[Question] = set()
        core.on_failure(self._lose_rank)
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """True while new requests can be served."""
        return self._error is None and not (self._closing or self._core.failure) and self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, None while it lives."""
        return self._error

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        wake: asyncio.Event | None = None,
    ) -> RequestStream:
        """Hands a request to the engine and returns its deltas as soon as the engine has accepted it.

        Raises InvalidRequestError if the engine refuses the request, EngineDeadError if it cannot serve, a 429 if too
        many answers wait.
        """
        return (await self.generate_all([Job(request_id, prompt_token_ids, params)], wake))[0]

    async def generate_all(self, jobs: list[Job], wake: asyncio.Event | None = None) -> list[RequestStream]:
        """As `generate` for jobs that all enter or none does; their streams share `wake` (`merge_streams`)."""
        streams = [RequestStream(self.abort, job.request_id, job.params.n, wake) for job in jobs]
        with self._work:
            if not self.is_healthy:
                raise EngineDeadError("the engine has stopped")
            if self._refusal is not None:
                raise self._refusal
            self._line.enter(sum(job.params.n for job in jobs))
            for stream, job in zip(streams, jobs, strict=True):
                self._entering[job.request_id] = stream
                self._inbox.append(lambda stream=stream, job=job: self._add(stream, job))
            self._work.notify()
        try:
            await asyncio.gather(*(stream.accepted for stream in streams))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def check_room(self) -> None:
        """Raises 429 if not even one more answer may wait now: worth knowing before a prompt is encoded."""
        with self._work:
            self._line.check_room(1)

    @property
    def rejected(self) -> dict[str, int]:
        """Calls refused because of load or a shutdown, by reason."""
        return {"queue_full": self._line.num_refused, **self._rejected}

    def count_rejection(self, reason: str) -> None:
        """Belongs to the event loop."""
        self._rejected[reason] += 1

    @property
    def parse_errors(self) -> dict[str, int]:
        """Tool calls in answers that could not be read, by reason."""
        return dict(self._parse_errors)

    def count_parse_error(self, reason: str) -> None:
        """Belongs to the event loop."""
        self._parse_errors[reason] += 1

    def retry_after(self) -> int:
        """Seconds in which those that wait now should have begun."""
        with self._work:
            return self._line.retry_after()

    @property
    def max_queued_requests(self) -> int | None:
        """Most answers that may wait, None for no limit."""
        return self._line.limit

    def end_all(self, error: Exception) -> None:
        """Every running request fails with `error`, and so does every one that comes later. Safe from any thread."""
        with self._work:
            self._refusal = error
            if self.is_healthy:
                self._inbox.append(lambda: self._fail_running(error))
                self._work.notify()

    async def ask(self, function: Callable[[Any], Any]) -> Any:
        """What `function(core)` returns or raises, called in the core thread between two steps.

        Raises EngineDeadError if the engine cannot serve.
        """
        question = Question(function)
        with self._work:
            if not self.is_healthy:
                raise EngineDeadError("the engine has stopped")
            self._questions.add(question)
            self._inbox.append(lambda: self._answer(question))
            self._work.notify()
        return await question.answer

    def abort(self, request_id: str) -> None:
        """Ends a request early and frees its blocks; an unknown id is ignored. Safe from any thread."""
        with self._work:
            if self.is_healthy:
                self._inbox.append(lambda: self._abort(request_id))
                self._work.notify()

    async def end_calls(self, name: str | None) -> int:
        """Ends the requests of the calls known by `name`, all for None; their answers finish with reason abort.

        Returns how many requests there were. Raises EngineDeadError if the engine cannot serve.
        """
        return await self.ask(lambda core: self._end_calls(core, name))

    def _lose_rank(self) -> None:
        """A rank has failed. The core's thread says so to all, unless it hangs itself."""
        with self._work:
            self._work.notify()
        stuck = threading.Timer(STUCK_SECONDS, self._speak_for_core)
        stuck.daemon = True
        stuck.start()

    def _speak_for_core(self) -> None:
        if self._thread.is_alive() and self._error is None:
            self._end(EngineDeadError(self._core.failure))

    def close(self) -> None:
        """Blocks until the core has shut down, which a failed one may never do; may be repeated."""
        self.grammar_desk.close()
        with self._work:
            self._closing = True
            self._work.notify()
        self._thread.join(STUCK_SECONDS if self._error else None)

    # Everything below runs in the core thread.
    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_unfinished():
                    self._deliver(self._core.step())
                with self._work:
                    self._follow_core()
            self._fail_all(EngineDeadError("the engine was closed"))
        except BaseException as exc:  # whatever it is, clients must hear of it: a dead thread answers nobody
            self._end(exc)
        finally:
            self._core.shutdown()

    def _end(self, error: BaseException) -> None:
        with self._work:
            if self._error is not None:
                return
            self._error = error
        # A lost rank has told its reason; anything else is a bug, and its traceback is wanted.
        known = isinstance(error, EngineDeadError) and error.__cause__ is None
        logger.critical("the engine failed: %s", error, exc_info=None if known else error)
        self._fail_all(EngineDeadError("the engine has stopped"))
        if self._on_error is not None:
            self._on_error(error)

    def _take_commands(self) -> bool:
        """Runs what is in the inbox, waiting for it if the core is idle; False when the client is closing.

        Raises EngineDeadError if a rank has failed.
        """
        core = self._core
        with self._work:
            while not (self._inbox or self._closing or core.failure or core.has_unfinished()):
                self._work.wait()
            commands = list(self._inbox)
            self._inbox.clear()
            if self._closing:
                return False
        if core.failure:
            raise EngineDeadError(core.failure)
        for command in commands:
            command()
        return True

    def _add(self, stream: RequestStream, job: Job) -> None:
        refusal = None
        try:
            self._core.validate(job.prompt_token_ids, job.params)
            self._core.add_request(job.request_id, job.prompt_token_ids, job.params)
            self._running[job.request_id] = _Running(stream, job.params.n, job.call_names)
        except InvalidRequestError as exc:
            refusal = exc
        with self._work:
            del self._entering[job.request_id]
            self._line.leave_entrance(job.params.n)
            self._follow_core()
        self._call(stream.loop, stream._accept, refusal)

    def _follow_core(self) -> None:
        self._line.follow_core(self._core.num_unbegun, self._core.num_begun, self._core.num_free_seats)

    def _answer(self, question: Question) -> None:
        try:
            value = question.function(self._core)
        except Exception as error:  # the asker's affair; if it was the engine that failed, the core says so next
            self._call(question.loop, question.fail, error)
        else:
            self._call(question.loop, question.succeed, value)
        with self._work:
            self._questions.remove(question)

    def _abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None) is not None:
            self._core.abort_request(request_id)

    def _end_calls(self, core: Any, name: str | None) -> int:
        """Their readers stay, for the end that the core now says."""
        ids = [i for i, running in self._running.items() if name is None or name in running.call_names]
        for request_id in ids:
            core.abort_request(request_id)
        return len(ids)

    def _deliver(self, deltas: list[CompletionDelta]) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, CompletionDelta]]] = {}
        for delta in deltas:
            running = self._running.get(delta.request_id)
            if running is None:  # aborted while the step ran
                continue
            batches.setdefault(running.stream.loop, []).append((running.stream, delta))
            running.num_running -= delta.finish_reason is not None
            if running.num_running == 0:
                del self._running[delta.request_id]
        for loop, batch in batches.items():
            self._call(loop, push_batch, batch)

    def _fail_running(self, error: Exception) -> None:
        for request_id, running in list(self._running.items()):
            self._abort(request_id)
            self._call(running.stream.loop, running.stream._fail, error)

    def _fail_all(self, error: Exception) -> None:
        with self._work:  # after this no new request enters: is_healthy is false
            self._closing = True
            streams = [r.stream for r in self._running.values()] + list(self._entering.values())
            questions = list(self._questions)
            self._questions.clear()
            self._running.clear()
            self._entering.clear()
            self._inbox.clear()
        for stream in streams:
            self._call(stream.loop, stream._fail, error)
        for question in questions:
            self._call(question.loop, question.fail, error)

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable, *args: Any) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has closed, and its readers went with it
            gone = [name for name, running in self._running.items() if running.stream.loop is loop]
            for request_id in gone:
                self._abort(request_id)
