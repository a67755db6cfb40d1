"""The page at `/`: a chat beside live panels, as static files that need no key; its own requests carry one.

The files are read once, when the app is made, and each has a route of its own: no path of a request touches the disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

JAVASCRIPT = "text/javascript; charset=utf-8"
MODULES = (
    "answer.js",
    "api.js",
    "chat.js",
    "dom.js",
    "experts.js",
    "heatmap.js",
    "history.js",
    "names.js",
    "page.js",
    "panel.js",
    "panels.js",
    "poller.js",
    "prometheus.js",
    "settings.js",
    "sparkline.js",
)
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
} | dict.fromkeys(MODULES, JAVASCRIPT)
ROUTES = {f"/page/{name}": name for name in MEDIA_TYPES if name != "index.html"} | {"/": "index.html"}
OPEN_PATHS = frozenset(ROUTES)  # asked for without a key
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asks again each time; the ETag makes that cheap
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page, in memory."""

    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    async def __call__(self, request: Request) -> Response:
        """The file, or 304 where the browser has it."""
        headers = HEADERS | {"etag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in known or known.strip() == "*":
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_router() -> APIRouter:
    """GET and HEAD of every file of the page; none is in the OpenAPI page."""
    router, folder = APIRouter(), files("engine.server") / "page"
    for path, name in ROUTES.items():
        file = PageFile((folder / name).read_bytes(), MEDIA_TYPES[name])
        router.add_api_route(path, file.__call__, methods=["GET", "HEAD"], include_in_schema=False)
    return router
