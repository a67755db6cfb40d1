"""Around every request: its id, its line in the access log, the API key, and the last resort for failures."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.call_ids import ANSWER_ID, CALL_ID, name_call
from engine.server.errors import ApiError, as_api_error
from engine.server.page import OPEN_PATHS as PAGE_PATHS
from engine.server.transport import OUTCOME

logger = logging.getLogger("turnout.access")

# As they stand in the request; to be read without a key.
OPEN_PATHS = frozenset(path.encode() for path in {"/health"} | PAGE_PATHS)


class RequestMiddleware:
    """Gives every response an `X-Request-Id`, the client's if it sent a sane one, and logs one line, never a prompt: it
    ends with that id and the answer's, if there is one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name_call(scope)
        started, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = scope[CALL_ID]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:  # in the middle of its own request
            scope[OUTCOME] = "disconnected"
        except Exception as exc:
            error = as_api_error(exc)  # logs it
            if status:
                raise
            await error.response()(scope, receive, send_with_id)
        finally:
            elapsed = 1000 * (time.perf_counter() - started)
            outcome = scope.get(OUTCOME, "ok" if 0 < status < 400 else "refused")
            # ascii(): a path may hold anything, a log line must stay one line.
            path = ascii(scope["path"])[1:-1]
            ids = " ".join(filter(None, (scope[CALL_ID], scope.get(ANSWER_ID))))
            logger.info("%s %s %d %s %.0f ms %s", scope["method"], path, status, outcome, elapsed, ids)


class HeadMiddleware:
    """Answers HEAD as GET would be answered, without the body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message | {"body": b""} if message["type"] == "http.response.body" else message)

        await self._app(dict(scope, method="GET"), receive, send_head)


class ApiKeyMiddleware:
    """Lets nothing but reading OPEN_PATHS through without one of the keys: unknown routes, other spellings of a path
    and the OpenAPI page ask for one too."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]):
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope) or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "The API key is absent or wrong; send the header Authorization: Bearer KEY."
        error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        await error.response()(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # Compares with every key: the time taken tells nothing about them.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _is_open(scope: Scope) -> bool:
    return scope.get("method") in ("GET", "HEAD") and scope.get("raw_path") in OPEN_PATHS
