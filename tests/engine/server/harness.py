"""A real server on a loopback port over a `FakeCore`, and small readers of what it sends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from engine.chat_template import ChatTemplate
from engine.server import responses
from engine.server.app import create_app
from engine.server.client import EngineClient
from engine.server.drain import Drain
from engine.tokenizer import KIMI_SPECIAL_OFFSETS, VISIBLE_MARKERS, Tokenizer
from models.kimi_k25.tool_declaration import declare_tools
from tests.engine.server.fake_core import FakeCore
from tests.tokenizers import byte_ranks

TEMPLATE = Path(__file__).resolve().parents[3] / "models" / "kimi_k25" / "tiny" / "chat_template.jinja"
HI = [{"role": "user", "content": "Hi"}]


@cache
def tokenizer() -> Tokenizer:
    ranks = byte_ranks()
    names = {len(ranks) + i: f"<|reserved_token_{len(ranks) + i}|>" for i in range(256)}
    names |= {len(ranks) + offset: name for name, offset in KIMI_SPECIAL_OFFSETS.items()}
    hidden = [token for token, name in names.items() if name not in VISIBLE_MARKERS]
    return Tokenizer(ranks, {name: token for token, name in names.items()}, hidden)


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), declare_tools)


def emit(text: str) -> list[int]:
    """Token ids of `text`, control tokens included; the core adds the end of the message itself."""
    return tokenizer().encode(text, allow_special=True)


def make_core(**options: Any) -> FakeCore:
    defaults = {"default_script": emit("thoughts</think>answer")}
    return FakeCore(tokenizer(), chat_template(), **defaults | options)


@dataclass
class RunningServer:
    core: Any
    client: EngineClient
    url: str
    port: int
    drain: Drain
    app: Any

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, trust_env=False, verify=False, **options)

    def openai(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.http() as http:
            return http.post(path, json=body, **options)

    def chat(self, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", {"messages": HI} | fields)
        assert response.status_code == 200, response.text
        return check(responses.ChatCompletion, response.json())

    def chat_chunks(self, **fields: Any) -> list[dict[str, Any]]:
        events = self.events("/v1/chat/completions", {"messages": HI, "stream": True} | fields)
        return [check(responses.ChatCompletionChunk, event) for event in events]

    def complete(self, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": "Hi"} | fields)
        assert response.status_code == 200, response.text
        return check(responses.Completion, response.json())

    def completion_chunks(self, **fields: Any) -> list[dict[str, Any]]:
        events = self.events("/v1/completions", {"prompt": "Hi", "stream": True} | fields)
        return [check(responses.Completion, event) for event in events]

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that must end well."""
        data = read_stream(self.post(path, body))
        assert data[-1] == "[DONE]" and "[DONE]" not in data[:-1]
        return [json.loads(item) for item in data[:-1]]

    def refusal(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        """The error object of a request that must be refused with `status`."""
        return error_of(self.post(path, body), status)


def paths_of(routes: list[Any]) -> list[str]:
    """Of all routes, those of routers that were included with them, whatever the OpenAPI page shows."""
    paths = []
    for route in routes:
        inner = getattr(route, "original_router", None)
        paths += [route.path] if inner is None else paths_of(inner.routes)
    return paths


def check(model: Any, value: dict[str, Any]) -> dict[str, Any]:
    """`value`, after holding it against the documented shape."""
    model.model_validate(value, strict=True)
    return value


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, (response.status_code, response.text)
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers["x-request-id"]
    check(responses.ErrorResponse, response.json())
    return response.json()["error"]


def read_stream(response: httpx.Response) -> list[str]:
    """The data of each server-sent event; every event must be one `data:` line and a blank line."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == "" and all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def texts(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, str]:
    """The joined text deltas of one choice by field."""
    joined: dict[str, str] = {}
    for delta in _deltas(chunks, index):
        for key, value in delta.items():
            if isinstance(value, str):
                joined[key] = joined.get(key, "") + value
    return joined


def tool_calls(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]] | None:
    """One choice's calls, joined as OpenAI's SDK does it: the index is a place in the list. None if there are none."""
    calls: list[dict[str, Any]] = []
    for delta in _deltas(chunks, index):
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                assert part["function"]["arguments"] == "" and part["function"]["name"]
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls or None


def message_of(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What the chunks of one choice amount to, null where a text is absent."""
    joined = texts(chunks, index)
    assert joined["role"] == "assistant" and joined.get("reasoning") == joined.get("reasoning_content")
    names = ("content", "reasoning_content")
    return {name: joined.get(name) or None for name in names} | {"tool_calls": tool_calls(chunks, index)}


def _deltas(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


CUTS: tuple[int | list[int], ...] = (1, 2, 3, [1, 4, 2], 1000)


def both(server: RunningServer, script: str | list[int], **fields: Any) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """(message, finish_reason, usage) of one script, proven the same streamed in several cuts and not streamed."""
    core = server.core
    core.default_script = emit(script) if isinstance(script, str) else script
    whole = server.chat(**fields)
    choice = whole["choices"][0]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    for core.tokens_per_step in CUTS:
        chunks = server.chat_chunks(stream_options={"include_usage": True}, **fields)
        expected = {name: message.get(name) or None for name in ("content", "reasoning_content", "tool_calls")}
        assert message_of(chunks) == expected, core.tokens_per_step
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in c["delta"] for c in choices[1:])
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + [choice["finish_reason"]]
        assert choices[-1].get("stop_reason") == choice["stop_reason"]
        assert chunks[-1]["usage"] == whole["usage"]
    core.tokens_per_step = 1
    return message, choice["finish_reason"], whole["usage"]


def request_bytes(path: str, body: dict) -> bytes:
    """A whole HTTP request, for clients that hang up."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


@contextmanager
def serving(core: Any = None, **options: Any) -> Iterator[RunningServer]:
    """Runs a server over `core` or a fake one for the length of the block; `options` go to `create_app`, but for
    `max_queued_requests`."""
    core = core or make_core()
    client = EngineClient(core, max_queued_requests=options.pop("max_queued_requests", None))
    app = create_app(client, **{"served_model_names": ["tiny", "kimi"]} | options)
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio turns Nagle's algorithm off only for sockets made with an explicit protocol; accepted ones inherit this.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            started.set()

    server = Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    assert started.wait(10)
    port = listener.getsockname()[1]
    try:
        yield RunningServer(core, client, f"http://127.0.0.1:{port}", port, app.state.drain, app)
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()
        assert not isinstance(core, FakeCore) or core.is_shut_down
