"""/v1/chat/completions: messages to a prompt, the engine's deltas to reasoning and content.

With `tool_choice: "none"` the tools are rendered all the same (see `check_tools`). Tool markup in the output is text
in `content`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.request import CompletionDelta
from engine.sampling_params import SamplingParams
from engine.server.client import EngineClient
from engine.server.context import ServerContext, new_id
from engine.server.errors import bad_request
from engine.server.fields import check_extra_fields
from engine.server.generation import Envelope, Generation
from engine.server.logprobs import chat_logprobs, prompt_logprobs_json
from engine.server.protocol import ChatCompletionRequest, ChatFields
from engine.server.reasoning import ReasoningMarkers, ReasoningSplitter
from engine.server.sampling import check_stream_options, fit_context, sampling_params
from engine.server.thinking import template_switches
from engine.server.tools import check_tools
from engine.server.transport import EventStream, finish_unless_disconnected
from engine.server.usage import UsageCounter

CHUNK = "chat.completion.chunk"


@dataclass(frozen=True)
class ChatPrompt:
    token_ids: list[int]
    thinking: bool | None  # as the request asks, None where it leaves it to the template


async def encode_chat(client: EngineClient, body: ChatFields, add_generation_prompt: bool = True) -> ChatPrompt:
    """The prompt of a chat. Raises 400 for messages, tools or switches that cannot be rendered."""
    template = client.chat_template
    if template is None:
        raise bad_request("This checkpoint has no chat template; use /v1/completions.", "messages")
    for i, message in enumerate(body.messages):
        for key in ("partial", "function_call"):
            if message.get(key):
                raise bad_request(f"messages[{i}].{key} is not supported.", f"messages[{i}].{key}")
    tools = check_tools(body.tools, body.tool_choice)
    switches = template_switches(body, template)
    token_ids = await asyncio.to_thread(
        template.encode,
        client.tokenizer,
        body.messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        **switches,
    )
    return ChatPrompt(token_ids, switches.get("thinking"))


def chat_params(body: ChatCompletionRequest, client: EngineClient, prompt_len: int) -> SamplingParams:
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
        tokenizer, skip = self.client.tokenizer, self.params.skip_special_tokens
        markers = ReasoningMarkers.of(tokenizer)
        splits = self.prompt.thinking is not False and markers.may_reason(self.prompt.token_ids)
        inside = markers.opened_by(self.prompt.token_ids)
        self.choices = [
            _Choice(self, i, ReasoningSplitter(tokenizer, markers, inside, skip) if splits else None)
            for i in range(self.params.n)
        ]

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

    def read(self, delta: CompletionDelta) -> _Piece:
        """Counts a delta and turns it into what the client sees of it."""
        choice = self.choices[delta.index]
        before = choice.num_reasoning_tokens
        pieces = choice.split(delta)
        self.envelope.usage.push(delta)
        self.envelope.usage.num_reasoning_tokens += choice.num_reasoning_tokens - before
        logprobs = None
        if self.params.logprobs is not None:
            top = self.params.logprobs
            logprobs = chat_logprobs(self.client.tokenizer, delta.token_ids, delta.logprobs or [], top)
        return _Piece(pieces, logprobs, delta)


@dataclass
class _Piece:
    texts: list[tuple[str, str]]
    logprobs: list[dict[str, Any]] | None
    delta: CompletionDelta


class _Choice:
    def __init__(self, call: ChatCall, index: int, splitter: ReasoningSplitter | None):
        self._splitter = splitter
        self._index = index
        self._return_token_ids = bool(call.body.return_token_ids)
        self._started = False
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._logprobs: list[dict[str, Any]] | None = None
        self._token_ids: list[int] = []
        self._last: CompletionDelta | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._splitter.num_reasoning_tokens if self._splitter else 0

    def split(self, delta: CompletionDelta) -> list[tuple[str, str]]:
        if self._splitter is None:
            return [("content", delta.text)] if delta.text else []
        return self._splitter.push(delta.token_ids, delta.text)

    def add(self, piece: _Piece) -> None:
        for channel, text in piece.texts:
            self._texts[channel].append(text)
        if piece.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += piece.logprobs
        self._token_ids += piece.delta.token_ids
        self._last = piece.delta

    def to_dict(self) -> dict[str, Any]:
        reasoning, content = ("".join(self._texts[channel]) for channel in ("reasoning", "content"))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._splitter is not None:
            message["content"] = content or None
            message["reasoning_content"] = reasoning or None
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        choice = {"index": self._index, "message": message, "logprobs": logprobs}
        choice |= {"finish_reason": self._last.finish_reason, "stop_reason": self._last.stop_reason}
        return choice | ({"token_ids": self._token_ids} if self._return_token_ids else {})

    def chunks(self, piece: _Piece) -> Iterator[dict[str, Any]]:
        """The choices of the events for one piece: the role once, text with its logprobs, the finish reason last."""
        if not self._started:
            self._started = True
            yield self._chunk({"role": "assistant", "content": ""})
        extras = {} if piece.logprobs is None else {"logprobs": {"content": piece.logprobs, "refusal": None}}
        if self._return_token_ids:
            extras["token_ids"] = piece.delta.token_ids
        texts = piece.texts or ([("content", "")] if extras and piece.delta.token_ids else [])
        for channel, text in texts:
            key = "reasoning_content" if channel == "reasoning" else "content"
            yield self._chunk({key: text}, **extras)
            extras = {}
        if piece.delta.finish_reason is not None:
            reasons = {"finish_reason": piece.delta.finish_reason, "stop_reason": piece.delta.stop_reason}
            yield self._chunk({}, **reasons)

    def _chunk(self, delta: dict[str, str], **more: Any) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None} | more


async def create_chat_completion(request: Request) -> Response:
    context = ServerContext.of(request)
    body = await context.read(request, ChatCompletionRequest)
    model = context.resolve_model(body.model)
    request_id = new_id("chatcmpl")
    warnings = check_extra_fields(body, request_id)
    check_stream_options(body)
    client = context.client
    client.check_room()
    prompt = await encode_chat(client, body)
    num_prompt_tokens = len(prompt.token_ids)
    params = chat_params(body, client, num_prompt_tokens)
    generation = await Generation.start(client, request_id, [(prompt.token_ids, params)])
    envelope = Envelope(request_id, model, warnings, body, UsageCounter(num_prompt_tokens))
    call = ChatCall(body, client, prompt, params, envelope, generation)
    if body.stream:
        return EventStream(call.events(), generation.close)
    return await finish_unless_disconnected(request, call.answer(), generation.close)
