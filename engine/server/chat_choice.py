"""One choice of a chat completion: the parser's deltas as the chunks of a stream, or joined as a message."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.request import CompletionDelta
from engine.server.output_parser import ArgumentsDelta, CallDelta, Delta, OutputParser, TextDelta


@dataclass
class Piece:
    """What one delta of the engine brings the client. finish_reason: the client's, None while the answer goes on."""

    deltas: list[Delta]
    finish_reason: str | None
    source: CompletionDelta
    logprobs: list[dict[str, Any]] | None = None


@dataclass
class _Call:
    id: str
    name: str
    arguments: list[str]

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class Choice:
    """A choice is either streamed (`chunks` of each piece) or collected (`add` each piece, then `to_dict`).

    shows_reasoning: otherwise the reasoning is read, counted and left out.
    """

    def __init__(self, index: int, parser: OutputParser, return_token_ids: bool, shows_reasoning: bool = True):
        self.index = index
        self.parser = parser
        self._return_token_ids = return_token_ids
        self._shows_reasoning = shows_reasoning
        self._started = False
        self._texts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._calls: list[_Call] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._token_ids: list[int] = []
        self._last: Piece | None = None

    def read(self, delta: CompletionDelta) -> Piece:
        deltas, reason = self.parser.push(delta.token_ids, delta.text), delta.finish_reason
        if reason is not None:
            rest, reason = self.parser.finish(reason, delta.stop_reason)
            deltas += rest
        return Piece([one for one in deltas if self._shows(one)], reason, delta)

    def _shows(self, delta: Delta) -> bool:
        return self._shows_reasoning or not (isinstance(delta, TextDelta) and delta.channel == "reasoning")

    def add(self, piece: Piece) -> None:
        for delta in piece.deltas:
            if isinstance(delta, TextDelta):
                self._texts[delta.channel].append(delta.text)
            elif isinstance(delta, CallDelta):
                self._calls.append(_Call(delta.id, delta.name, []))
            else:
                self._calls[delta.index].arguments.append(delta.text)
        if piece.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += piece.logprobs
        self._token_ids += piece.source.token_ids
        self._last = piece

    def to_dict(self) -> dict[str, Any]:
        """OpenAI's choice. Raises nothing: the answer's last piece must have been added."""
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        choice = {"index": self.index, "message": self._message(), "logprobs": logprobs}
        choice |= {"finish_reason": self._last.finish_reason, "stop_reason": self._last.source.stop_reason}
        return choice | ({"token_ids": self._token_ids} if self._return_token_ids else {})

    def _message(self) -> dict[str, Any]:
        reasoning, content = ("".join(self._texts[channel]) for channel in ("reasoning", "content"))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.parser.splits or self._calls:
            message["content"] = content or None
        if self.parser.splits and self._shows_reasoning:
            message |= dict.fromkeys(("reasoning_content", "reasoning"), reasoning or None)
        if self._calls:
            message["tool_calls"] = [call.to_dict() for call in self._calls]
        return message

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The choices of the events for one piece: the role once, its deltas, the finish reason last. Logprobs and ids
        come with the first delta, or with an empty one where nothing is shown yet."""
        if not self._started:
            self._started = True
            yield self._chunk({"role": "assistant", "content": ""})
        extras = {} if piece.logprobs is None else {"logprobs": {"content": piece.logprobs, "refusal": None}}
        if self._return_token_ids:
            extras["token_ids"] = piece.source.token_ids
        deltas = [_delta(delta) for delta in piece.deltas]
        if not deltas and extras and piece.source.token_ids:
            deltas.append({"content": ""})
        for delta in deltas:
            yield self._chunk(delta, **extras)
            extras = {}
        if piece.finish_reason is not None:
            yield self._chunk({}, finish_reason=piece.finish_reason, stop_reason=piece.source.stop_reason)

    def _chunk(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None} | more


def _delta(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, TextDelta):
        names = ("reasoning_content", "reasoning") if delta.channel == "reasoning" else ("content",)
        return dict.fromkeys(names, delta.text)
    call: dict[str, Any] = {"index": delta.index}
    if isinstance(delta, ArgumentsDelta):
        return {"tool_calls": [call | {"function": {"arguments": delta.text}}]}
    return {
        "tool_calls": [call | {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}]
    }
