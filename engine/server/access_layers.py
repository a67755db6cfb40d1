"""What stands before the routes, whether the server loads or serves: keys, origins, ids, the access log."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from engine.server.drain import Drain, DrainMiddleware
from engine.server.middleware import ApiKeyMiddleware, HeadMiddleware, RequestMiddleware

SHOWN_TO_PAGES = ("x-request-id", "retry-after")


def wrap(app: Starlette, api_keys: tuple[str, ...], allow_origins: tuple[str, ...], drain: Drain | None = None) -> None:
    """The last one added sees a request first: the browser's question about origins comes without a key, and what
    refuses a call is told to web pages too."""
    app.add_middleware(HeadMiddleware)
    if api_keys:
        app.add_middleware(ApiKeyMiddleware, api_keys=api_keys)
    if drain is not None:
        app.add_middleware(DrainMiddleware, drain=drain)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allow_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=SHOWN_TO_PAGES,
        )
    app.add_middleware(RequestMiddleware)
