"""The engine requests behind one HTTP call, started together, read as one, ended together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from engine.request import QUEUE_TIMEOUT, REQUEST_TIMEOUT, CompletionDelta
from engine.sampling_params import SamplingParams
from engine.server.client import EngineClient, Job
from engine.server.errors import ApiError
from engine.server.protocol import SamplingFields
from engine.server.streams import RequestStream, merge_streams
from engine.server.usage import UsageCounter


class Generation:
    """`async for number, delta in generation` reads it: `number` is the prompt's place. `close` may be repeated."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._wake = asyncio.Event()
        self._streams: list[RequestStream] = []

    @classmethod
    async def start(
        cls,
        client: EngineClient,
        request_id: str,
        jobs: list[tuple[list[int], SamplingParams]],
        names: frozenset[str] = frozenset(),
    ) -> Generation:
        """Returns once the engine has accepted every job (prompt token ids, params); one refusal ends them all.

        names: what the call is known by to `EngineClient.end_calls`."""
        generation = cls(client)
        named = [Job(f"{request_id}-{i}", ids, params, names) for i, (ids, params) in enumerate(jobs)]
        generation._streams = await client.generate_all(named, generation._wake)
        return generation

    async def __aiter__(self) -> AsyncIterator[tuple[int, CompletionDelta]]:
        """Raises 503 if an answer waited too long for its first step, 504 if it took too long, 400 if its grammar left
        it nothing to say, once what it has is read."""
        async for number, delta in merge_streams(self._streams, self._wake):
            if delta.finish_reason not in ("timeout", "error"):
                yield number, delta
                continue
            if delta.token_ids or delta.text:
                yield number, replace(delta, finish_reason=None, stop_reason=None)
            raise self._timeout(delta) if delta.finish_reason == "timeout" else self._dead_end(delta)

    def _dead_end(self, delta: CompletionDelta) -> ApiError:
        message = f"The answer cannot go on as its grammar wants: {delta.stop_reason}."
        return ApiError(400, message, code="grammar_dead_end")

    def _timeout(self, delta: CompletionDelta) -> ApiError:
        if delta.stop_reason == QUEUE_TIMEOUT:
            self._client.count_rejection(QUEUE_TIMEOUT)
            seconds = self._client.retry_after()
            message = f"The request waited too long for its turn; try again in {seconds} s."
            return ApiError(503, message, code=QUEUE_TIMEOUT, headers={"retry-after": str(seconds)})
        message = "The answer took longer than this server allows; ask for fewer tokens."
        return ApiError(504, message, code=REQUEST_TIMEOUT, headers={"x-should-retry": "false"})

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


@dataclass
class Envelope:
    """What every answer and chunk of one call has in common. `fingerprint` changes with the build and its settings."""

    id: str
    model: str
    warnings: list[str]
    body: SamplingFields
    usage: UsageCounter
    fingerprint: str

    def __post_init__(self) -> None:
        self._created = int(time.time())
        self._first = True

    def answer(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = self._head(kind, choices) | {"usage": self.usage.to_dict()} | more
        return head | ({"warnings": self.warnings} if self.warnings else {})

    def chunk(self, kind: str, choice: dict[str, Any], **first: Any) -> dict[str, Any]:
        """One event. The first carries the warnings and `first`; usage comes along if asked for, null until the end."""
        head = self._head(kind, [choice])
        options = self.body.stream_options
        if options is not None and options.continuous_usage_stats:
            head["usage"] = self.usage.to_dict()
        elif options is not None and options.include_usage:
            head["usage"] = None
        if self._first:
            head |= first | ({"warnings": self.warnings} if self.warnings else {})
            self._first = False
        return head

    def last_chunks(self, kind: str) -> list[dict[str, Any]]:
        """The usage event, if the request wants one."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._head(kind, []) | {"usage": self.usage.to_dict()}]

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint, "choices": choices}
