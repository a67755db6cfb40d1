"""Routes for those who run the server: what it is, whether it generates, and ending what it is busy with."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.sampling_params import MAX_N, MAX_STOP_STRINGS, SamplingParams
from engine.server import limits
from engine.server.body_values import MAX_DEPTH
from engine.server.call_ids import new_id
from engine.server.context import ServerContext
from engine.server.errors import ApiError, bad_request
from engine.server.generation import Generation
from engine.server.protocol import AbortRequest
from engine.server.transport import finish_unless_disconnected, json_response
from engine.version import __version__

# Settings that tell nothing about the host: no path, no key.
SHOWN = (
    *("tp", "ep", "device", "dtype", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "num_draft_tokens"),
    *("enable_prefix_caching", "moe_comm", "attention_backend", "enforce_eager", "load_format"),
    *("max_queued_requests", "queue_timeout", "request_timeout"),
)
PROBE_SECONDS = 20.0
MOST_URGENT = -(2**31)


async def server_info(request: Request) -> Response:
    """What runs here, with which settings and limits."""
    context = ServerContext.of(request)
    client = context.client
    config = await client.ask(lambda core: core.config)
    answer = {
        "version": __version__,
        "model": client.model_name,
        "served_model_names": list(context.served_model_names),
        "max_model_len": client.max_model_len,
        "vocab_size": client.vocab_size,
        "has_draft": config.draft is not None,
        "engine": {name: getattr(config, name) for name in SHOWN},
        "limits": {
            "body_bytes": context.max_body_bytes,
            "nesting": MAX_DEPTH,
            "values": limits.MAX_VALUES,
            "tokenized_bytes": limits.MAX_TOKENIZED_BYTES,
            "messages": limits.MAX_MESSAGES,
            "content_parts": limits.MAX_PARTS,
            "tools": limits.MAX_TOOLS,
            "schema_bytes": limits.MAX_SCHEMA_BYTES,
            "n": MAX_N,
            "stop": MAX_STOP_STRINGS,
        },
    }
    return json_response(answer)


async def health_generate(request: Request) -> Response:
    """200 once one token has gone through the engine. It waits in line like any request, ahead of all others."""
    client = ServerContext.of(request).client
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, priority=MOST_URGENT)
    generation = await Generation.start(client, new_id("health"), [([0], params)])
    return await finish_unless_disconnected(request, _first_token(generation), generation.close)


async def _first_token(generation: Generation) -> dict[str, Any]:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            num_tokens = sum([len(delta.token_ids) async for _, delta in generation])
    except TimeoutError:
        message = f"No token came within {PROBE_SECONDS:g} s; the server is overloaded or hangs."
        raise ApiError(503, message, code="no_token", headers={"retry-after": "1"}) from None
    if not num_tokens:
        raise ApiError(503, "The request was aborted before its token came.", code="no_token")
    return {"status": "ok"}


async def abort_request(request: Request) -> Response:
    """Ends what runs or waits under an id, or everything; the answers end with finish reason abort."""
    context = ServerContext.of(request)
    body = await context.read(request, AbortRequest)
    if (body.request_id is None) == (not body.abort_all):
        raise bad_request("Give either request_id or abort_all: true.", "request_id")
    return json_response({"num_aborted": await context.client.end_calls(body.request_id)})
