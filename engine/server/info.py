"""The small routes: models, health, version, and the tokenizer from outside."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.expert_load import ExpertLoad
from engine.server.call_ids import new_id
from engine.server.chat import encode_chat
from engine.server.context import ServerContext
from engine.server.errors import ENGINE_DEAD_MESSAGE, ApiError, bad_request
from engine.server.fields import check_extra_fields
from engine.server.prompt_limit import TOKENIZE_LIMIT
from engine.server.protocol import DetokenizeRequest, RequestModel, TokenizeRequest
from engine.server.transport import json_response
from engine.version import __version__

EXPERT_LOAD_SECONDS = 1.0  # counts are read from the device no more often


def _card(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "turnout",
        "root": context.client.model_name,
        "max_model_len": context.client.max_model_len,
    }


async def list_models(request: Request) -> Response:
    context = ServerContext.of(request)
    return json_response({"object": "list", "data": [_card(context, n) for n in context.served_model_names]})


async def get_model(request: Request, model_id: str) -> Response:
    context = ServerContext.of(request)
    return json_response(_card(context, context.resolve_model(model_id)))


async def health(request: Request) -> Response:
    """200 while requests can be served, 503 from the moment the engine has failed. Needs no key."""
    if not ServerContext.of(request).client.is_healthy:
        raise ApiError(503, ENGINE_DEAD_MESSAGE, code="engine_dead")
    return json_response({"status": "ok"})


async def load(request: Request) -> Response:
    """How busy the server is: for a balancer that picks the least loaded of several."""
    client, drain = ServerContext.of(request).client, ServerContext.of(request).drain
    stats = await client.ask(lambda core: core.stats())
    return json_response(
        {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "max_queued_requests": client.max_queued_requests,
            "kv_cache_usage_ratio": stats.kv_cache_usage,
            "kv_cache_blocks": stats.kv_cache_blocks,
            "is_draining": drain.is_on,
        }
    )


async def flush_cache(request: Request) -> Response:
    """Empties the prefix cache; blocks that running requests hold stay theirs."""
    await ServerContext.of(request).client.ask(lambda core: core.flush_prefix_cache())
    return json_response({"status": "flushed"})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def expert_load(request: Request) -> Response:
    """Tokens routed to each expert, at most a second old."""
    load = await ServerContext.of(request).client.ask(_expert_load)
    if load is None:
        raise ApiError(404, "This server does not count experts; start it without --no-expert-load.", code="not_found")
    return json_response(asdict(load))


def _expert_load(core: Any) -> ExpertLoad | None:
    return core.expert_load(EXPERT_LOAD_SECONDS) if core.counts_experts else None


def _with_warnings(answer: dict[str, Any], body: RequestModel) -> Response:
    warnings = check_extra_fields(body, new_id("tok"))
    return json_response(answer | ({"warnings": warnings} if warnings else {}))


async def tokenize(request: Request) -> Response:
    """Token ids of `prompt` as /v1/completions reads it, or of `messages` (and `tools`) as a chat."""
    context = ServerContext.of(request)
    body = await context.read(request, TokenizeRequest)
    context.resolve_model(body.model)
    client = context.client
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.prompt is not None:
        TOKENIZE_LIMIT.check([body.prompt], "prompt")
        tokens = await asyncio.to_thread(client.tokenizer.encode, body.prompt, allow_special=True)
    else:
        tokens = (await encode_chat(client, body, TOKENIZE_LIMIT, body.add_generation_prompt is not False)).token_ids
    return _with_warnings({"tokens": tokens, "count": len(tokens), "max_model_len": client.max_model_len}, body)


async def tokenizer_info(request: Request) -> Response:
    """The names of the tokens that a client of /tokenize needs to know; evaluation tools ask for them first."""
    client = ServerContext.of(request).client
    tokenizer = client.tokenizer
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    names = {name: tokenizer.token_bytes(token).decode() for name, token in ids.items()}
    return json_response(names | {"vocab_size": client.vocab_size, "model_max_length": client.max_model_len})


async def detokenize(request: Request) -> Response:
    """The text of `tokens`, special tokens shown."""
    context = ServerContext.of(request)
    body = await context.read(request, DetokenizeRequest)
    context.resolve_model(body.model)
    size = context.client.vocab_size
    for i, token in enumerate(body.tokens):
        if not 0 <= token < size:
            raise bad_request(
                f"tokens[{i}] is {token}, but the vocabulary has the ids 0 to {size - 1}.", f"tokens[{i}]"
            )
    text = await asyncio.to_thread(context.client.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return _with_warnings({"prompt": text}, body)
