"""The end of a server that lets what it has accepted finish: no new work, no abandoned work.

From `begin` on every new call is answered 503, also on connections that are kept alive or new, so that a load balancer
sees a clean refusal and sends the call elsewhere; only what tells of the server's state still answers. Calls that came
before go on.
"""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.client import EngineClient
from engine.server.errors import ApiError

PROBE = "/health"
STILL_ANSWERED = ("/metrics", "/load", "/version")
SETTLE_SECONDS = 1.5  # for answers cut short to reach their clients
BODY_SECONDS = 1.0  # that a call whose body is not all there has, once the server drains
_TICK_SECONDS = 0.05


class Drain:
    """Whether the server takes new calls, and how many it is still busy with. Belongs to the event loop."""

    def __init__(self, client: EngineClient):
        self.is_on = False
        self.num_calls = 0
        self._client = client

    def begin(self) -> None:
        self.is_on = True

    def refusal(self, path: str) -> ApiError:
        """503. Another replica can take the call at once, hence the shortest time to wait."""
        if path != PROBE:
            self._client.count_rejection("draining")
        message = "This server is shutting down and takes no new requests; try again, on another one if there is any."
        return ApiError(503, message, code="draining", headers={"retry-after": "1"})

    async def finish(self, timeout: float) -> None:
        """Returns when nothing is left to answer. After `timeout` seconds what still runs ends with an error."""
        await self._until_idle(timeout)
        if self.num_calls:
            message = "The server is shutting down and could not wait for the end of this answer."
            self._client.end_all(ApiError(503, message, code="shutting_down", headers={"retry-after": "1"}))
            await self._until_idle(SETTLE_SECONDS)

    async def _until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.num_calls and time.monotonic() < deadline:
            await asyncio.sleep(_TICK_SECONDS)


class DrainMiddleware:
    """Counts calls in flight; while the server drains, refuses new ones and closes every connection that it answers."""

    def __init__(self, app: ASGIApp, drain: Drain):
        self._app, self._drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        drain = self._drain

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and drain.is_on:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        if drain.is_on and scope["path"] not in STILL_ANSWERED:
            await drain.refusal(scope["path"]).response()(scope, receive, send_and_close)
            return
        drain.num_calls += 1
        try:
            await self._app(scope, _Body(receive, drain, scope["path"]), send_and_close)
        finally:
            drain.num_calls -= 1


class _Body:
    """`receive` of one call. A call is accepted once its body is whole: one that is slow to come does not hold up the
    end. Raises the refusal then, as the route would for any other fault of the body."""

    def __init__(self, receive: Receive, drain: Drain, path: str):
        self._receive, self._drain, self._path = receive, drain, path
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        message = await self._next()
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def _next(self) -> Message:
        coming = asyncio.ensure_future(self._receive())
        try:
            draining = 0.0
            while not (await asyncio.wait({coming}, timeout=_TICK_SECONDS))[0]:
                draining += _TICK_SECONDS if self._drain.is_on else 0.0
                if draining > BODY_SECONDS:
                    raise self._drain.refusal(self._path)
            return coming.result()
        finally:
            coming.cancel()
