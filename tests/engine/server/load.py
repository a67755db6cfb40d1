"""Many clients at once, over real connections: what they ask, when they hang up, what they got."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

import httpx

from tests.engine.server.harness import RunningServer
from tests.processes import until

COMPLETIONS = "/v1/completions"


def run_clients(server: RunningServer, *clients) -> list[Any]:
    """The results of `clients`, functions of an `httpx.AsyncClient`, all started at once."""

    async def everyone() -> list[Any]:
        options = {"timeout": 60, "trust_env": False, "limits": httpx.Limits(max_connections=None)}
        async with httpx.AsyncClient(base_url=server.url, **options) as http:
            return await asyncio.gather(*(client(http) for client in clients))

    return asyncio.run(everyone())


def asking(body: dict[str, Any]):
    """A client that wants the whole answer: its response, not read as a stream even if it is one."""

    def client(http: httpx.AsyncClient) -> Coroutine[Any, Any, httpx.Response]:
        return http.post(COMPLETIONS, json=body)

    return client


def leaving(body: dict[str, Any], after: float):
    """A client that hangs up `after` seconds: its response if that came before, else None."""

    async def client(http: httpx.AsyncClient) -> httpx.Response | None:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(http.post(COMPLETIONS, json=body), after)
        return None

    return client


def text_of(response: httpx.Response) -> str:
    """Of the first choice, streamed or not; the answer must have ended well."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        return response.json()["choices"][0]["text"]
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]", done
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def cold_answers(server: RunningServer, bodies: list[dict[str, Any]]) -> list[str]:
    """Each alone, on a cache that nobody has used."""
    texts = []
    with server.http() as http:
        for body in bodies:
            assert http.post("/flush_cache").status_code == 200
            texts.append(text_of(http.post(COMPLETIONS, json=body)))
    return texts


def settle(server: RunningServer) -> None:
    """Waits until nothing runs and checks that nothing was left behind."""
    core = server.core
    until(lambda: not core.has_unfinished(), 60, "nothing runs")
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    blocks = stats.kv_cache_blocks
    assert blocks["held"] == 0 and sum(blocks.values()) == core.replica.scheduler.kv_cache.pool.num_usable
    assert core.num_unbegun == 0 and not core.unfinished_ids()
    until(lambda: not server.client._line.num_waiting, 10, "nobody waits")
    assert not server.client._running and not server.client._entering


def resident_bytes() -> int:
    """Of this process, the server's included."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
