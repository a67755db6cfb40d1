"""/v1/chat/completions: messages to a prompt, the engine's deltas to reasoning, content and tool calls.

With `tool_choice: "none"` the tools are rendered all the same (see `check_tools`), and tool markup in the output is
text in `content`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.request import CompletionDelta
from engine.sampling_params import SamplingParams
from engine.server.binding import bind_chat
from engine.server.call_ids import name_answer
from engine.server.chat_choice import Choice, Piece
from engine.server.client import EngineClient
from engine.server.context import ServerContext
from engine.server.errors import bad_request
from engine.server.fields import check_extra_fields
from engine.server.generation import Envelope, Generation
from engine.server.logprobs import chat_logprobs, prompt_logprobs_json
from engine.server.output_parser import OutputParser
from engine.server.prompt_limit import PromptLimit, context_limit, message_texts
from engine.server.protocol import ChatCompletionRequest, ChatFields
from engine.server.sampling import check_stream_options, fit_context, sampling_params
from engine.server.thinking import template_switches
from engine.server.tool_rules import ToolRules
from engine.server.tools import check_tools, tool_rules
from engine.server.transport import EventStream, finish_unless_disconnected, unless_disconnected
from engine.server.usage import UsageCounter
from engine.structured_outputs import StructuredOutputs

logger = logging.getLogger("turnout.server")

CHUNK = "chat.completion.chunk"


@dataclass(frozen=True)
class ChatPrompt:
    token_ids: list[int]
    thinking: bool | None  # as the request asks, None where it leaves it to the template
    tool_rules: ToolRules


async def encode_chat(
    client: EngineClient, body: ChatFields, limit: PromptLimit, add_generation_prompt: bool = True
) -> ChatPrompt:
    """The prompt of a chat. Raises 400 for messages, tools or switches that cannot be rendered, and for a text beyond
    `limit`, of which only the messages' own is weighed before rendering: of the rest a template may leave out parts."""
    template = client.chat_template
    if template is None:
        raise bad_request("This checkpoint has no chat template; use /v1/completions.", "messages")
    for i, message in enumerate(body.messages):
        for key in ("partial", "function_call"):
            if message.get(key):
                raise bad_request(f"messages[{i}].{key} is not supported.", f"messages[{i}].{key}")
    tools = check_tools(body.tools, body.tool_choice)
    switches = template_switches(body, template)
    limit.check(message_texts(body.messages), "messages")
    token_ids = await asyncio.to_thread(
        template.encode,
        client.tokenizer,
        body.messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        check_text=lambda text: limit.check([text], "messages"),
        **switches,
    )
    return ChatPrompt(token_ids, switches.get("thinking"), tool_rules(body))


def chat_params(
    body: ChatCompletionRequest, client: EngineClient, prompt_len: int, outputs: StructuredOutputs | None
) -> SamplingParams:
    """Raises 400 (context_length_exceeded for a prompt that leaves no room)."""
    if not body.logprobs and body.top_logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    asked, name = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, name = body.max_tokens, "max_tokens"
    params = sampling_params(
        body,
        client.generation_defaults,
        {"max_tokens": name, "logprobs": "top_logprobs"},
        max_tokens=asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured_outputs=outputs,
    )
    return fit_context(params, prompt_len, client.max_model_len, "messages")


@dataclass
class ChatCall:
    """One accepted call: the same pieces feed its stream and its single answer."""

    body: ChatCompletionRequest
    client: EngineClient
    prompt: ChatPrompt
    params: SamplingParams
    envelope: Envelope
    generation: Generation

    def __post_init__(self) -> None:
        shows, ids = self.body.include_reasoning is not False, bool(self.body.return_token_ids)
        self.choices = [Choice(index, self._parser(), ids, shows) for index in range(self.params.n)]

    def _parser(self) -> OutputParser:
        splits = self.prompt.thinking is not False
        skip = self.params.skip_special_tokens
        return OutputParser(self.client.tokenizer, self.prompt.token_ids, self.prompt.tool_rules, splits, skip)

    async def answer(self) -> dict[str, Any]:
        more: dict[str, Any] = {}
        async for _, delta in self.generation:
            self.choices[delta.index].add(self.read(delta))
            if delta.prompt_logprobs is not None:
                more["prompt_logprobs"] = prompt_logprobs_json(self.client.tokenizer, delta.prompt_logprobs)
        if self.body.return_token_ids:
            more["prompt_token_ids"] = self.prompt.token_ids
        return self.envelope.answer("chat.completion", [choice.to_dict() for choice in self.choices], **more)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        first = {"prompt_token_ids": self.prompt.token_ids} if self.body.return_token_ids else {}
        async for _, delta in self.generation:
            for choice in self.choices[delta.index].chunks(self.read(delta)):
                yield self.envelope.chunk(CHUNK, choice, **first)
        for chunk in self.envelope.last_chunks(CHUNK):
            yield chunk

    def read(self, delta: CompletionDelta) -> Piece:
        """Counts a delta and turns it into what the client sees of it."""
        choice = self.choices[delta.index]
        before, num_errors = choice.parser.num_reasoning_tokens, len(choice.parser.errors)
        piece = choice.read(delta)
        self.envelope.usage.push(delta)
        self.envelope.usage.num_reasoning_tokens += choice.parser.num_reasoning_tokens - before
        self._count_errors(choice, num_errors)
        if self.params.logprobs is not None:
            top = self.params.logprobs
            piece.logprobs = chat_logprobs(self.client.tokenizer, delta.token_ids, delta.logprobs or [], top)
        return piece

    def _count_errors(self, choice: Choice, num_known: int) -> None:
        """Those after the first `num_known`; the log has the first of each answer."""
        errors = choice.parser.errors
        for error in errors[num_known:]:
            self.client.count_parse_error(error)
        if errors and not num_known:
            logger.warning(
                "request %s, answer %d: a tool call could not be read (%s) and was passed on as text",
                self.envelope.id,
                choice.index,
                errors[0],
            )


async def create_chat_completion(request: Request) -> Response:
    context = ServerContext.of(request)
    body = await context.read(request, ChatCompletionRequest)
    model = context.resolve_model(body.model)
    request_id, shown_id, names = name_answer(request, "chatcmpl", body.request_id)
    warnings = check_extra_fields(body, request_id)
    check_stream_options(body)
    client = context.client
    client.check_room()
    prompt = await encode_chat(client, body, context_limit(client.max_model_len, client.tokenizer.max_token_bytes))
    num_prompt_tokens = len(prompt.token_ids)
    binding = bind_chat(body, prompt.tool_rules, client.tokenizer, prompt.token_ids, client.grammar_desk)
    bound = await unless_disconnected(request, binding)
    warnings += bound.warnings
    params = chat_params(body, client, num_prompt_tokens, bound.outputs)
    generation = await Generation.start(client, request_id, [(prompt.token_ids, params)], names)
    envelope = Envelope(shown_id, model, warnings, body, UsageCounter(num_prompt_tokens), client.system_fingerprint)
    call = ChatCall(body, client, prompt, params, envelope, generation)
    if body.stream:
        return EventStream(call.events(), generation.close, context.sse_keep_alive)
    return await finish_unless_disconnected(request, call.answer(), generation.close)
