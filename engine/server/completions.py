"""/v1/completions: one or many prompts, as text or token ids, each answered n times.

A text prompt is the whole input of the model, so control tokens written in it are control tokens, as users of raw
prompts expect; chats never take this path. Choice `prompt * n + i` is answer i to that prompt. With `echo` and
`max_tokens: 0` the prompt alone is scored: the engine makes one token, which is dropped and not counted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.request import CompletionDelta
from engine.sampling_params import SamplingParams
from engine.server.binding import bind_completion
from engine.server.call_ids import name_answer
from engine.server.client import EngineClient
from engine.server.context import ServerContext
from engine.server.errors import bad_request
from engine.server.fields import check_extra_fields
from engine.server.generation import Envelope, Generation
from engine.server.logprobs import TextOffsets, completion_logprobs, prompt_logprobs_json
from engine.server.prompt_limit import context_limit
from engine.server.protocol import CompletionRequest
from engine.server.sampling import check_stream_options, fit_context, sampling_params
from engine.server.transport import EventStream, finish_unless_disconnected, unless_disconnected
from engine.server.usage import UsageCounter
from engine.structured_outputs import StructuredOutputs

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 1024


async def encode_prompts(client: EngineClient, prompt: Any, n: int) -> list[list[int]]:
    """The prompts of a request in token ids. Raises 400 for an empty one, and before any work for too many answers and
    for a text that can never fit the context."""
    many = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    prompts = prompt if many else [prompt]
    if len(prompts) * n > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts times n={n} exceed {MAX_CHOICES} answers.", "prompt")
    for i, item in enumerate(prompts):
        if not item:
            where = f"prompt[{i}]" if many else "prompt"
            raise bad_request(f"{where} is empty; give at least one token.", where)
    if not prompts:
        raise bad_request("prompt is empty; give at least one.", "prompt")
    limit = context_limit(client.max_model_len, client.tokenizer.max_token_bytes)
    for item in prompts:
        if isinstance(item, str):
            limit.check([item], "prompt")

    def encode() -> list[list[int]]:
        encode_text = client.tokenizer.encode
        return [encode_text(item, allow_special=True) if isinstance(item, str) else item for item in prompts]

    return await asyncio.to_thread(encode) if any(isinstance(item, str) for item in prompts) else prompts


def completion_params(
    body: CompletionRequest, client: EngineClient, outputs: StructuredOutputs | None
) -> SamplingParams:
    """The parameters before they are fitted to the length of each prompt."""
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise bad_request("max_tokens must be at least 1, or 0 together with echo.", "max_tokens")
    scores = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scores = max(body.logprobs, scores or 0)
    fixed = {"max_tokens": 1 if asked == 0 else asked, "logprobs": body.logprobs, "prompt_logprobs": scores}
    return sampling_params(body, client.generation_defaults, {}, **fixed, structured_outputs=outputs)


@dataclass
class _Piece:
    """What one delta adds to a choice; `token_ids` and `logprobs` may begin with those of an echoed prompt."""

    text: str
    token_ids: list[int]
    logprobs: dict[str, list] | None
    delta: CompletionDelta


class _Choice:
    def __init__(self, call: CompletionCall, index: int):
        self.index = index
        self.pieces: list[_Piece] = []
        self._call = call
        self._number = index // call.params.n
        self._prompt = call.prompts[self._number]
        self._offsets = TextOffsets(call.client.tokenizer)
        self._echoed = not call.body.echo
        self._has_begun = False

    def read(self, delta: CompletionDelta) -> _Piece:
        call = self._call
        if call.prompt_only:
            reason = "abort" if delta.finish_reason == "abort" else "length"
            delta = replace(delta, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)
        echo = [] if self._echoed else self._prompt
        self._echoed = True
        text = call.client.tokenizer.decode(echo, skip_special_tokens=False) + delta.text
        logprobs = None if call.body.logprobs is None else self._logprobs(echo, delta)
        return _Piece(text, echo + delta.token_ids, logprobs, delta)

    def _logprobs(self, echo: list[int], delta: CompletionDelta) -> dict[str, list]:
        """Of the echoed prompt and the delta; control tokens of a prompt are shown, those of an answer as asked."""
        call, tokenizer = self._call, self._call.client.tokenizer
        unscored = [None] * len(echo)
        scores = [*(call.scores.get(self._number, unscored) if echo else ()), *(delta.logprobs or ())]
        skip = call.params.skip_special_tokens
        offsets = [self._offsets.push(token, False) for token in echo]
        offsets += [self._offsets.push(token, skip and tokenizer.is_hidden(token)) for token in delta.token_ids]
        return completion_logprobs(tokenizer, echo + delta.token_ids, scores, call.body.logprobs, offsets)

    def to_dict(self) -> dict[str, Any]:
        last, call = self.pieces[-1].delta, self._call
        logprobs = None
        if call.body.logprobs is not None:
            parts = [piece.logprobs for piece in self.pieces]
            logprobs = {key: [item for part in parts for item in part[key]] for key in parts[0]}
        choice = {"index": self.index, "text": "".join(piece.text for piece in self.pieces), "logprobs": logprobs}
        choice |= {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}
        if call.body.prompt_logprobs is not None:
            scores = call.scores.get(self._number)
            choice["prompt_logprobs"] = scores and prompt_logprobs_json(call.client.tokenizer, scores)
        if call.body.return_token_ids:
            choice["prompt_token_ids"] = self._prompt
            choice["token_ids"] = [token for piece in self.pieces for token in piece.delta.token_ids]
        return choice

    def chunk(self, piece: _Piece) -> dict[str, Any] | None:
        """The choice of the event for one piece; None if there is nothing to say yet. The prompt's ids come first."""
        body = self._call.body
        if not piece.text and piece.delta.finish_reason is None:
            spoken = body.logprobs is not None or body.return_token_ids
            if not (spoken and piece.token_ids):
                return None
        choice = {"index": self.index, "text": piece.text, "logprobs": piece.logprobs}
        choice["finish_reason"] = piece.delta.finish_reason
        if piece.delta.finish_reason is not None:
            choice["stop_reason"] = piece.delta.stop_reason
        if body.return_token_ids:
            choice |= {} if self._has_begun else {"prompt_token_ids": self._prompt}
            choice["token_ids"] = piece.delta.token_ids
            self._has_begun = True
        return choice


@dataclass
class CompletionCall:
    body: CompletionRequest
    client: EngineClient
    prompts: list[list[int]]
    params: SamplingParams
    envelope: Envelope
    generation: Generation

    def __post_init__(self) -> None:
        self.prompt_only = self.body.max_tokens == 0
        self.scores: dict[int, list] = {}
        self.choices = [_Choice(self, i) for i in range(len(self.prompts) * self.params.n)]

    async def _pieces(self) -> AsyncIterator[tuple[_Choice, _Piece]]:
        """Reads the deltas; where an echo needs the prompt's scores, those that come before the scores wait. An answer
        that was aborted may never get any."""
        waiting: dict[int, list[CompletionDelta]] = defaultdict(list)
        needs_scores = bool(self.body.echo) and self.body.logprobs is not None
        async for number, delta in self.generation:
            if delta.prompt_logprobs is not None:
                self.scores[number] = delta.prompt_logprobs
            if needs_scores and number not in self.scores and delta.finish_reason != "abort":
                waiting[number].append(delta)
                continue
            for ready in [*waiting.pop(number, ()), delta]:
                choice = self.choices[number * self.params.n + ready.index]
                piece = choice.read(ready)
                self.envelope.usage.push(piece.delta)
                yield choice, piece

    async def answer(self) -> dict[str, Any]:
        async for choice, piece in self._pieces():
            choice.pieces.append(piece)
        return self.envelope.answer(KIND, [choice.to_dict() for choice in self.choices])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        async for choice, piece in self._pieces():
            chunk = choice.chunk(piece)
            if chunk is not None:
                yield self.envelope.chunk(KIND, chunk)
        for chunk in self.envelope.last_chunks(KIND):
            yield chunk


async def create_completion(request: Request) -> Response:
    context = ServerContext.of(request)
    body = await context.read(request, CompletionRequest)
    model = context.resolve_model(body.model)
    request_id, shown_id, names = name_answer(request, "cmpl", body.request_id)
    warnings = check_extra_fields(body, request_id)
    check_stream_options(body)
    client = context.client
    client.check_room()
    bound = await unless_disconnected(request, bind_completion(body, client.grammar_desk))
    warnings += bound.warnings
    params = completion_params(body, client, bound.outputs)
    prompts = await encode_prompts(client, body.prompt, params.n)
    jobs = [(ids, fit_context(params, len(ids), client.max_model_len, "prompt")) for ids in prompts]
    generation = await Generation.start(client, request_id, jobs, names)
    envelope = Envelope(
        shown_id, model, warnings, body, UsageCounter(sum(map(len, prompts))), client.system_fingerprint
    )
    call = CompletionCall(body, client, prompts, params, envelope, generation)
    if body.stream:
        return EventStream(call.events(), generation.close, context.sse_keep_alive)
    return await finish_unless_disconnected(request, call.answer(), generation.close)
