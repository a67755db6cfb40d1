"""Puts the routes together: `create_app` is all that a launcher needs besides uvicorn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from engine.server import admin, info, metrics, responses
from engine.server.access_layers import wrap
from engine.server.chat import create_chat_completion
from engine.server.client import EngineClient
from engine.server.completions import create_completion
from engine.server.context import ServerContext
from engine.server.docs_page import docs_router
from engine.server.drain import PROBE, Drain
from engine.server.errors import install_error_handlers
from engine.server.openapi import body_of, event_of, install_openapi
from engine.server.page import page_router
from engine.server.protocol import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from engine.server.render import render_chat
from engine.server.responses import errors
from engine.version import __version__

MAX_BODY_BYTES = 8 * 2**20
SSE_KEEP_ALIVE = 10.0  # seconds
GET_ERRORS = (401, 500, 503)
POST_ERRORS = (400, 401, 404, 408, 413, 415, 500, 503)
ANSWER_ERRORS = (*POST_ERRORS, 429, 504)


def _stream_of(model: type[BaseModel]) -> dict:
    """A 200 that is either the JSON of the response model or a stream of events."""
    name = model.__name__
    description = f"With stream: true a stream of events, each a {name}, ended by [DONE] or by an ErrorResponse."
    return {200: {"description": description, "content": {"text/event-stream": {"schema": event_of(model)}}}}


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
STREAMED = {CHAT: responses.ChatCompletionChunk, COMPLETIONS: responses.Completion}
POSTS = (
    (CHAT, create_chat_completion, ChatCompletionRequest, responses.ChatCompletion),
    (f"{CHAT}/render", render_chat, ChatCompletionRequest, responses.RenderedChat),
    (COMPLETIONS, create_completion, CompletionRequest, responses.Completion),
    ("/tokenize", info.tokenize, TokenizeRequest, responses.Tokens),
    ("/v1/tokenize", info.tokenize, TokenizeRequest, responses.Tokens),
    ("/detokenize", info.detokenize, DetokenizeRequest, responses.DetokenizedPrompt),
    ("/v1/detokenize", info.detokenize, DetokenizeRequest, responses.DetokenizedPrompt),
    ("/abort_request", admin.abort_request, AbortRequest, responses.Aborted),
)
LOADING = {503: {"model": responses.Loading | responses.ErrorResponse}}
GETS = (
    ("/v1/models", info.list_models, responses.ModelList, ()),
    ("/v1/models/{model_id:path}", info.get_model, responses.ModelCard, (404,)),
    (PROBE, info.health, responses.Health, ()),
    ("/health_generate", admin.health_generate, responses.Health, (429, 504)),
    ("/expert_load", info.expert_load, responses.ExpertLoad, (404,)),
    ("/load", info.load, responses.Load, ()),
    ("/version", info.version, responses.Version, ()),
    ("/server_info", admin.server_info, responses.ServerInfo, ()),
    ("/tokenizer_info", info.tokenizer_info, responses.TokenizerInfo, ()),
)


def _router() -> APIRouter:
    router = APIRouter()
    for path, handler, body, answer in POSTS:
        stream = _stream_of(STREAMED[path]) if path in STREAMED else {}
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=answer,
            openapi_extra=body_of(body),
            responses=errors(*(ANSWER_ERRORS if path in STREAMED else POST_ERRORS)) | stream,
        )
    for path, handler, answer, statuses in GETS:
        router.add_api_route(
            path,
            handler,
            methods=["GET"],
            response_model=answer,
            responses=errors(*GET_ERRORS, *statuses) | (LOADING if path == PROBE else {}),
        )
    router.add_api_route(
        "/flush_cache",
        info.flush_cache,
        methods=["POST"],
        response_model=responses.Flushed,
        responses=errors(*GET_ERRORS),
    )
    router.add_api_route(
        "/metrics", metrics.metrics, methods=["GET"], response_class=metrics.Text, responses=errors(*GET_ERRORS)
    )
    return router


def create_app(
    client: EngineClient,
    *,
    served_model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
    allow_origins: Sequence[str] = (),
    sse_keep_alive: float = SSE_KEEP_ALIVE,
) -> FastAPI:
    """The ASGI app. With `api_keys` every route but the open ones asks for one of them. Web pages from `allow_origins`
    may call it. A stream with nothing to send for `sse_keep_alive` seconds sends a comment; 0: never.

    The app closes `client` at its end; `app.state.drain` stops it from taking new calls.

    Raises ValueError if there is no model name or a key is empty.
    """
    if not served_model_names or not all(served_model_names):
        raise ValueError("served_model_names needs at least one name, and none may be empty.")
    if not all(key.strip() for key in api_keys):
        raise ValueError("An API key is empty; give a key or leave the option out.")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(client.close)

    app = FastAPI(
        title="Turnout",
        version=__version__,
        description="OpenAI-compatible inference.",
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    drain = app.state.drain = Drain(client)
    app.state.context = ServerContext(client, tuple(served_model_names), max_body_bytes, drain, sse_keep_alive)
    app.include_router(_router())
    app.include_router(page_router())
    app.include_router(docs_router())
    install_error_handlers(app)
    shown = [*dict.fromkeys(body for _, _, body, _ in POSTS), *STREAMED.values()]
    install_openapi(app, shown, needs_key=bool(api_keys))
    wrap(app, tuple(api_keys), tuple(allow_origins), drain)
    return app
