"""How long the text of a prompt may be, in bytes: known before the text is rendered or encoded, which takes seconds for
megabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.server.errors import bad_request
from engine.server.limits import MAX_TOKENIZED_BYTES


@dataclass(frozen=True)
class PromptLimit:
    """max_bytes: of UTF-8. `reason` completes "The prompt has N bytes, but"."""

    max_bytes: int
    code: str
    reason: str

    def check(self, texts: Iterable[str], param: str) -> None:
        """Raises 400 if all `texts` of a prompt, or of a part of it, together are beyond the limit."""
        num_bytes = sum(len(text) if text.isascii() else len(text.encode("utf-8", "replace")) for text in texts)
        if num_bytes > self.max_bytes:
            raise bad_request(f"The prompt has {num_bytes} bytes or more, but {self.reason}.", param, self.code)


TOKENIZE_LIMIT = PromptLimit(
    MAX_TOKENIZED_BYTES, "limit_exceeded", f"this route takes at most {MAX_TOKENIZED_BYTES}; send less"
)


def context_limit(max_model_len: int, max_token_bytes: int) -> PromptLimit:
    """Beyond which no text fits: each token stands for max_token_bytes at most."""
    most = max_model_len * max_token_bytes
    reason = f"the context holds {max_model_len} tokens of at most {max_token_bytes} bytes ({most}); shorten the prompt"
    return PromptLimit(most, "context_length_exceeded", reason)


def message_texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    """The texts that every template writes out: contents and the arguments of calls. What is malformed is passed over.

    Past reasoning is not among them, and declarations of tools are shorter than their JSON.
    """
    for message in messages:
        yield from _content_texts(message.get("content"))
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            yield from _value_texts(function.get("arguments") if isinstance(function, dict) else None)


def _content_texts(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def _value_texts(value: Any) -> Iterator[str]:
    """The keys and texts within a JSON value."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from value
            todo.extend(value.values())
        elif isinstance(value, list):
            todo.extend(value)
