"""A server before its engine stands: /health says how far the start is, every other call is asked to come back.

One app from the first connection to the last, so that none is lost or refused when the engine is ready: `open` puts the
real app behind it. It has no lifespan, since it begins before there is an engine: who runs it closes the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.loading.progress import Snapshot
from engine.server.access_layers import wrap
from engine.server.drain import PROBE
from engine.server.errors import ApiError

USUAL_WAIT, LONGEST_WAIT = 5, 60
"""Seconds for Retry-After: where the time left is not known, and at most, since an estimate may be wrong."""


class Gate:
    """The ASGI app of a server from the moment it listens. `snapshot` says how far the start is."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], api_keys: Sequence[str] = (), allow_origins: Sequence[str] = ()
    ):
        loading = Starlette(routes=[Mount("/", app=_Loading(snapshot))])
        wrap(loading, tuple(api_keys), tuple(allow_origins))
        self._loading: ASGIApp = loading
        self._app: ASGIApp | None = None

    def open(self, app: ASGIApp) -> None:
        """Every call from now on is the app's. May be called from another thread."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._app or self._loading)(scope, receive, send)


class _Loading:
    """503 to every call."""

    def __init__(self, snapshot: Callable[[], Snapshot]):
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await answer(self._snapshot(), is_probe=scope["path"] == PROBE)(scope, receive, send)


def answer(shot: Snapshot, is_probe: bool) -> JSONResponse:
    """The error that every client understands; a probe also gets the numbers."""
    message = "This server is loading and takes no requests yet; try again."
    if is_probe:
        message = f"This server is loading: {shot.phase}" + (f", {shot.words()}." if shot.total else ".")
    error = ApiError(503, message, code="loading", headers={"retry-after": str(_wait(shot))})
    numbers = {"status": "loading", "progress": shot.as_dict()} if is_probe else {}
    return JSONResponse(error.body() | numbers, status_code=error.status, headers=error.headers)


def _wait(shot: Snapshot) -> int:
    left = shot.seconds_left
    return USUAL_WAIT if not left else min(max(math.ceil(left), 1), LONGEST_WAIT)
