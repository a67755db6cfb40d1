"""Answers that stop working when the client hangs up, streamed as server-sent events or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import as_api_error

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
KEEP_ALIVE = b": keep-alive\n\n"
OUTCOME = "turnout.outcome"  # key in the ASGI scope: how the call ended, if not as its status says


class ClientDisconnectedError(Exception):
    """Nobody is left to read the answer."""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(work: Coroutine[Any, Any, Any], receive: Receive) -> Any:
    """The result of `work`; ClientDisconnectedError if the client hangs up first, with `work` cancelled."""
    watcher = asyncio.ensure_future(_disconnected(receive))
    worker = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnectedError
        return worker.result()
    finally:
        watcher.cancel()
        worker.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


def dumps(value: Any) -> bytes:
    """Compact JSON in pure ASCII: some readers of event streams take U+2028 and its like for line ends."""
    return _ENCODER.encode(value).encode("ascii")


def json_response(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns, which is cancelled if the client hangs up; raises starlette's ClientDisconnect then."""
    try:
        return await _race(work, request.receive)
    except ClientDisconnectedError:
        raise ClientDisconnect from None


async def finish_unless_disconnected(request: Request, work: Coroutine[Any, Any, Any], close: Callable[[], None]):
    """A JSON response of what `work` returns. `close` runs however it ends; a client that hung up gets nothing."""
    try:
        return json_response(await _race(work, request.receive))
    except ClientDisconnectedError:
        request.scope[OUTCOME] = "disconnected"
        return Response(status_code=499)
    finally:
        close()


class EventStream(Response):
    """Sends each item of `events` as one `data:` event, then [DONE].

    Headers go out with the first event, so what fails before it is an answer with its own status. A later failure
    becomes one event with a top-level `error`, which ends the stream without [DONE]. Whenever nothing was sent for
    `keep_alive` seconds (0: never), a comment is, with the headers before it if need be. `close` runs however the
    stream ends, also if it never began.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], None], keep_alive: float):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        line = _EventLine(send, self.raw_headers)
        beat = asyncio.ensure_future(line.keep_alive(self._keep_alive)) if self._keep_alive else None
        try:
            await _race(self._answer(line, scope, receive), receive)
        except (ClientDisconnectedError, OSError):
            scope[OUTCOME] = "disconnected"
        finally:
            if beat is not None:
                beat.cancel()
            self._close()

    async def _answer(self, line: _EventLine, scope: Scope, receive: Receive) -> None:
        try:
            async for item in self._events:
                await line.send(b"data: " + dumps(item) + b"\n\n")
        except OSError:
            raise
        except Exception as exc:
            error = as_api_error(exc)
            if await line.refuse(error.response(), scope, receive):
                return
            scope[OUTCOME] = "failed"
            await line.send(b"data: " + dumps(error.body()) + b"\n\n")
        else:
            await line.send(b"data: [DONE]\n\n")
        await line.end()


class _EventLine:
    """The way to the client, for the events and the comments between them: one at a time."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]):
        self._send, self._headers = send, headers
        self._lock = asyncio.Lock()
        self._started = self._ended = False
        self._last_sent = time.monotonic()

    async def send(self, data: bytes) -> None:
        async with self._lock:
            await self._write(data)

    async def refuse(self, response: Response, scope: Scope, receive: Receive) -> bool:
        """Answers with `response` instead of a stream, if nothing has been sent yet."""
        async with self._lock:
            if self._started:
                return False
            self._ended = True
            await response(scope, receive, self._send)
            return True

    async def end(self) -> None:
        async with self._lock:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, seconds: float) -> None:
        """Until the stream ends or nobody reads it."""
        wait = seconds
        with contextlib.suppress(OSError):  # the events find out as well
            while not self._ended:
                await asyncio.sleep(wait)
                async with self._lock:
                    wait = self._last_sent + seconds - time.monotonic()
                    if wait <= 0 and not self._ended:
                        await self._write(KEEP_ALIVE)
                        wait = seconds

    async def _write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_sent = time.monotonic()
