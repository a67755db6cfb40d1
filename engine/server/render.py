"""The prompt of a chat without an answer to it: what to look at when a template or a token count is in doubt."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.responses import Response

from engine.server.binding import bind_chat
from engine.server.call_ids import name_answer
from engine.server.chat import chat_params, encode_chat
from engine.server.context import ServerContext
from engine.server.fields import check_extra_fields
from engine.server.prompt_limit import TOKENIZE_LIMIT
from engine.server.protocol import ChatCompletionRequest
from engine.server.sampling import check_stream_options
from engine.server.transport import json_response, unless_disconnected


async def render_chat(request: Request) -> Response:
    """Takes a request of /v1/chat/completions and returns its prompt, as text and as token ids, and generates nothing.

    What is wrong with the request is refused as there, but a prompt may be longer than the context: up to
    MAX_TOKENIZED_BYTES."""
    context = ServerContext.of(request)
    body = await context.read(request, ChatCompletionRequest)
    model = context.resolve_model(body.model)
    warnings = check_extra_fields(body, name_answer(request, "render", body.request_id).own)
    check_stream_options(body)
    client = context.client
    prompt = await encode_chat(client, body, TOKENIZE_LIMIT)
    token_ids = prompt.token_ids
    binding = bind_chat(body, prompt.tool_rules, client.tokenizer, token_ids, client.grammar_desk)
    bound = await unless_disconnected(request, binding)
    warnings += bound.warnings
    chat_params(body, client, prompt_len=0, outputs=bound.outputs)
    text = await asyncio.to_thread(client.tokenizer.decode, token_ids, skip_special_tokens=False)
    answer = {"model": model, "prompt": text, "prompt_token_ids": token_ids, "count": len(token_ids)}
    answer["max_model_len"] = client.max_model_len
    return json_response(answer | ({"warnings": warnings} if warnings else {}))
