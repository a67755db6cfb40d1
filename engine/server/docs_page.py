"""The page at /docs: every route in a table, without scripts and without anything from another host."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from engine.server.page import HEADERS

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}: routes</title></head>
<body><h1>{title} {version}</h1>
<p>Fields, types and answers are in <a href="openapi.json">openapi.json</a>, for any reader of OpenAPI.</p>
<table><thead><tr><th>Method</th><th>Path</th><th>What it does</th></tr></thead><tbody>
{rows}
</tbody></table></body></html>
"""


def docs_router() -> APIRouter:
    router = APIRouter()
    router.add_api_route("/docs", show_routes, methods=["GET"], include_in_schema=False)
    return router


async def show_routes(request: Request) -> Response:
    """The routes of the OpenAPI page as HTML."""
    return HTMLResponse(_html(request.app.openapi()), headers=HEADERS)


def _html(page: dict[str, Any]) -> str:
    rows = [
        _row(method.upper(), path, operation.get("description") or operation.get("summary", ""))
        for path, operations in page["paths"].items()
        for method, operation in operations.items()
    ]
    info = page["info"]
    return PAGE.format(title=escape(info["title"]), version=escape(info["version"]), rows="\n".join(rows))


def _row(method: str, path: str, text: str) -> str:
    return f"<tr><td>{escape(method)}</td><td><code>{escape(path)}</code></td><td>{escape(text)}</td></tr>"
