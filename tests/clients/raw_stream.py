"""httpx-sse: the raw events of a stream, in order, and nothing between them that a strict reader minds."""

from __future__ import annotations

import json

import httpx
from httpx_sse import connect_sse
from steps import SUM, SUM_ANSWER, Target, run


def events(target: Target, **fields) -> tuple[httpx.Response, list[str]]:
    body = {"model": target.model, "messages": SUM, "temperature": 0, "stream": True} | fields
    headers = {"Authorization": f"Bearer {target.key}"}
    with (
        httpx.Client(headers=headers, timeout=60, trust_env=False) as client,
        connect_sse(client, "POST", f"{target.base}/chat/completions", json=body) as source,
    ):
        data = [event.data for event in source.iter_sse()]
        return source.response, data


def order(target: Target) -> str:
    """role first, thinking before content, one finish reason, usage last, then [DONE]"""
    response, data = events(target, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream"), response.headers
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    kinds = [kind for delta in deltas for kind in ("reasoning_content", "content") if delta.get(kind)]
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) == 2, kinds
    assert "".join(delta.get("content") or "" for delta in deltas) == SUM_ANSWER
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}, reasons
    assert len({chunk["id"] for chunk in chunks}) == 1
    return f"{len(data)} events"


def continuous(target: Target) -> None:
    """continuous_usage_stats: a usage in every chunk that only grows"""
    _, data = events(target, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [json.loads(item)["usage"]["completion_tokens"] for item in data[:-1]]
    assert counts == sorted(counts) and counts[-1] > 0, counts


if __name__ == "__main__":
    run("httpx-sse", [order, continuous])
