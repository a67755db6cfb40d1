"""Errors as OpenAI clients expect them: one nested object, a string code, and never a word about our insides."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from engine.errors import EngineDeadError, InvalidRequestError

logger = logging.getLogger("turnout.server")

ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
REASONS = {404: "There is no such route.", 405: "This route does not take this method."}
INTERNAL_MESSAGE = "The server failed to handle this request; its log has the reason under this request id."
ENGINE_DEAD_MESSAGE = "The engine has stopped and cannot serve requests; the server's log has the reason."


class ApiError(Exception):
    """An answer other than 2xx. `param` names the field at fault, e.g. "messages[0].content"."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = ERROR_TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def as_api_error(exc: Exception) -> ApiError:
    """Any failure as an answer. Unknown kinds are logged with their traceback and reach the client as a bare 500."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, InvalidRequestError):
        return ApiError(400, str(exc), param=exc.param, code=exc.code)
    if isinstance(exc, EngineDeadError):
        return ApiError(503, ENGINE_DEAD_MESSAGE, code="engine_dead")
    if isinstance(exc, HTTPException):
        message = REASONS.get(exc.status_code, str(exc.detail))
        return ApiError(exc.status_code, message, headers=dict(exc.headers) if exc.headers else None)
    logger.error("request failed", exc_info=exc)
    return ApiError(500, INTERNAL_MESSAGE, code="internal_error")


async def _handle(request: Request, exc: Exception) -> JSONResponse:
    return as_api_error(exc).response()


def install_error_handlers(app: FastAPI) -> None:
    """Every known failure becomes a nested JSON body; unknown ones are caught by `RequestMiddleware`."""
    for kind in (ApiError, InvalidRequestError, EngineDeadError, HTTPException):
        app.add_exception_handler(kind, _handle)
