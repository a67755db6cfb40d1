"""What may be wrong with a request, and with the engine."""

from __future__ import annotations


class InvalidRequestError(ValueError):
    """A request that can never be served; `param` names the field at fault, `code` is OpenAI's error code or None."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class EngineDeadError(RuntimeError):
    """The engine cannot go on; the message is the first reason."""
