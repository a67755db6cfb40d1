"""What every route needs of the server it belongs to."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from engine.server.body import read_model
from engine.server.client import EngineClient
from engine.server.drain import Drain
from engine.server.errors import ApiError

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class ServerContext:
    """`served_model_names` are the names that requests may use, the first being the one that answers carry when a
    request names none. sse_keep_alive: seconds without an event after which a stream sends a comment, 0 for never."""

    client: EngineClient
    served_model_names: tuple[str, ...]
    max_body_bytes: int
    drain: Drain
    sse_keep_alive: float
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, request: Request) -> ServerContext:
        return request.app.state.context

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with. Raises 404 for one that is not served."""
        if name is None:
            return self.served_model_names[0]
        if name not in self.served_model_names:
            known = ", ".join(self.served_model_names)
            message = f"The model {name[:200]!r} does not exist; this server has {known}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The request's body as `model`. Raises 4xx."""
        return await read_model(request, model, self.max_body_bytes)
