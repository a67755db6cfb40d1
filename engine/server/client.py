"""The bridge between asyncio and the engine core: one thread steps the core, requests and deltas cross over in batches.

The thread alone touches the core. Between two steps it drains an inbox of commands; with nothing to do it waits on a
condition, which a rank that fails meanwhile notifies too. Deltas enter the event loop once per step, and a reader that
falls behind finds them merged, one per choice, so a slow client never holds more than its own answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.request import CompletionDelta, EngineDeadError, InvalidRequestError, SamplingParams

logger = logging.getLogger("turnout.server")

STUCK_SECONDS = 4.0  # how long after a failure the core's thread is waited for


class _Backlog:
    """The unread deltas of one choice, merged: grows by what the answer grows, and adding costs no copy."""

    def __init__(self, first: CompletionDelta):
        self._last = first
        self._texts = [first.text]
        self._token_ids = list(first.token_ids)
        self._logprobs = None if first.logprobs is None else list(first.logprobs)
        self._prompt_logprobs = first.prompt_logprobs
        self._metrics = first.metrics

    def add(self, delta: CompletionDelta) -> None:
        self._last = delta
        if delta.text:
            self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if delta.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += delta.logprobs
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._metrics = delta.metrics or self._metrics

    def merged(self) -> CompletionDelta:
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            metrics=self._metrics,
        )


class RequestStream:
    """The deltas of one accepted request, an async iterable. Belongs to the event loop that made it.

    `close` frees the request's place in the engine; it must be called however reading ends, and may be repeated.
    """

    def __init__(self, client: EngineClient, request_id: str, num_choices: int, wake: asyncio.Event | None):
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self._client = client
        self._wake = wake or asyncio.Event()
        self._pending: dict[int, CompletionDelta | _Backlog] = {}
        self._num_running = num_choices
        self._error: Exception | None = None
        self._closed = False

    @property
    def exhausted(self) -> bool:
        """True once every choice has finished and all deltas were taken."""
        return self._num_running == 0 and not self._pending

    def take(self) -> list[CompletionDelta]:
        """What has come in since the last call, at most one delta per choice. Raises what made the request fail."""
        deltas = [p.merged() if isinstance(p, _Backlog) else p for p in self._pending.values()]
        self._pending.clear()
        if self._error is not None:
            if not deltas:
                raise self._error
            self._wake.set()  # there is more to take: the error
        return deltas

    async def __aiter__(self) -> AsyncIterator[CompletionDelta]:
        async for _, delta in merge_streams([self], self._wake):
            yield delta

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._num_running and self._error is None:
            self._client.abort(self.request_id)

    # The event loop runs these on behalf of the core thread.
    def _accept(self, error: Exception | None) -> None:
        if self.accepted.done():
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self._error = error
            self.accepted.set_exception(error)

    def _push(self, delta: CompletionDelta) -> None:
        unread = self._pending.setdefault(delta.index, delta)
        if unread is not delta:
            if not isinstance(unread, _Backlog):
                unread = self._pending[delta.index] = _Backlog(unread)
            unread.add(delta)
        self._num_running -= delta.finish_reason is not None
        self._wake.set()

    def _fail(self, error: Exception) -> None:
        self._accept(error)
        self._error = error
        self._wake.set()


@dataclass
class _Running:
    stream: RequestStream
    num_running: int


class _Question:
    """Something that one coroutine wants to know of the core."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Any] = self.loop.create_future()

    # The event loop runs these on behalf of the core thread.
    def succeed(self, value: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(value)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class EngineClient:
    """Runs `core` in its own thread and serves any number of coroutines.

    `on_error` is called once, in the core thread, with the exception that ended the engine. `close` ends the thread
    and shuts the core down; requests still running then fail with EngineDeadError.
    """

    def __init__(self, core: Any, on_error: Callable[[BaseException], None] | None = None):
        self.tokenizer = core.tokenizer
        self.chat_template = core.chat_template
        self.model_name: str = core.model_name
        self.max_model_len: int = core.max_model_len
        self.vocab_size: int = core.vocab_size
        self.generation_defaults: dict[str, Any] = dict(core.generation_defaults)
        self._core = core
        self._on_error = on_error
        self._inbox: deque[Callable[[], None]] = deque()
        self._work = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._running: dict[str, _Running] = {}
        self._entering: dict[str, RequestStream] = {}
        self._questions: set[_Question] = set()
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

        `request_id` must be unique. `wake` lets several streams share one event (`merge_streams`). Raises
        InvalidRequestError if the engine refuses the request, EngineDeadError if it cannot serve.
        """
        stream = RequestStream(self, request_id, params.n, wake)
        with self._work:
            if not self.is_healthy:
                raise EngineDeadError("the engine has stopped")
            self._entering[request_id] = stream
            self._inbox.append(lambda: self._add(stream, prompt_token_ids, params))
            self._work.notify()
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    async def ask(self, function: Callable[[Any], Any]) -> Any:
        """What `function(core)` returns or raises, called in the core thread between two steps.

        Raises EngineDeadError if the engine cannot serve.
        """
        question = _Question(function)
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

    def _add(self, stream: RequestStream, prompt_token_ids: list[int], params: SamplingParams) -> None:
        refusal = None
        try:
            self._core.validate(prompt_token_ids, params)
            self._core.add_request(stream.request_id, prompt_token_ids, params)
            self._running[stream.request_id] = _Running(stream, params.n)
        except InvalidRequestError as exc:
            refusal = exc
        with self._work:
            del self._entering[stream.request_id]
        self._call(stream.loop, stream._accept, refusal)

    def _answer(self, question: _Question) -> None:
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
            self._call(loop, _push_batch, batch)

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


def _push_batch(batch: list[tuple[RequestStream, CompletionDelta]]) -> None:
    for stream, delta in batch:
        stream._push(delta)


async def merge_streams(
    streams: list[RequestStream], wake: asyncio.Event
) -> AsyncIterator[tuple[int, CompletionDelta]]:
    """Yields (number of the stream, delta) from streams that share `wake`, in the order of arrival."""
    while True:
        wake.clear()
        taken = [(number, delta) for number, stream in enumerate(streams) for delta in stream.take()]
        for item in taken:
            yield item
        if all(stream.exhausted for stream in streams):
            return
        await wake.wait()  # at once if something came while the reader was at work
