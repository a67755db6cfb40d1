"""Answers that stop working when the client hangs up, streamed as server-sent events or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import as_api_error

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
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
    becomes one event with a top-level `error`, which ends the stream without [DONE]. `close` runs however the stream
    ends, also if it never began.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], None]):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(self._answer(scope, receive, send), receive)
        except (ClientDisconnectedError, OSError):
            scope[OUTCOME] = "disconnected"
        finally:
            self._close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            first = await anext(self._events, None)
        except Exception as exc:
            await as_api_error(exc).response()(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._write(first, scope, send)

    async def _write(self, first: dict[str, Any] | None, scope: Scope, send: Send) -> None:
        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        try:
            if first is not None:
                await event(dumps(first))
            async for item in self._events:
                await event(dumps(item))
        except OSError:
            raise
        except Exception as exc:
            scope[OUTCOME] = "failed"
            await event(dumps(as_api_error(exc).body()))
        else:
            await event(b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
