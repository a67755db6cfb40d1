"""What crosses from the core's thread into an event loop: the deltas of one request, and answers to questions.

A reader that falls behind finds its deltas merged, one per choice, so a slow client never holds more than its own
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from engine.request import CompletionDelta


class _Backlog:
    """The unread deltas of one choice, merged: grows by what the answer grows, and adding costs no copy."""

    def __init__(self, first: CompletionDelta):
        self._last = first
        self._texts = [first.text]
        self._token_ids = list(first.token_ids)
        self._logprobs = None if first.logprobs is None else list(first.logprobs)
        self._prompt_logprobs = first.prompt_logprobs
        self._metrics = first.metrics
        self._num_cached_tokens = first.num_cached_tokens

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
            num_cached_tokens=self._num_cached_tokens,
        )


class RequestStream:
    """The deltas of one accepted request, an async iterable. Belongs to the event loop that made it.

    `close` frees the request's place in the engine; it must be called however reading ends, and may be repeated.
    """

    def __init__(self, abort: Callable[[str], None], request_id: str, num_choices: int, wake: asyncio.Event | None):
        self.request_id = request_id
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self._abort = abort
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
            self._abort(self.request_id)

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


class Question:
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


def push_batch(batch: list[tuple[RequestStream, CompletionDelta]]) -> None:
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
