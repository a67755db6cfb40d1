"""One switch for thinking, in every spelling in use; an unknown spelling or a contradiction is a 400."""

from __future__ import annotations

from collections.abc import Iterator

from engine.server.errors import bad_request
from engine.server.protocol import ChatFields

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TYPES = ("enabled", "disabled")
TEMPLATE_KEYS = ("thinking", "enable_thinking")


def _switches(body: ChatFields) -> Iterator[tuple[str, bool]]:
    for key, value in (body.chat_template_kwargs or {}).items():
        where = f"chat_template_kwargs.{key[:40]}"
        if key not in TEMPLATE_KEYS:
            raise bad_request(f"{where} is not a switch of the chat template; use {TEMPLATE_KEYS[0]}.", where)
        if not isinstance(value, bool):
            raise bad_request(f"{where} must be true or false.", where)
        yield where, value
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in TYPES or len(body.thinking) > 1:
            raise bad_request('thinking must be {"type": "enabled"} or {"type": "disabled"}.', "thinking")
        yield "thinking", kind == "enabled"
    if body.enable_thinking is not None:
        yield "enable_thinking", body.enable_thinking
    if body.reasoning_effort is not None:
        if body.reasoning_effort not in EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
        yield "reasoning_effort", body.reasoning_effort != "none"


def thinking_switch(body: ChatFields) -> bool | None:
    """True or False as asked, None if the request leaves it to the checkpoint's template."""
    asked = list(_switches(body))
    for name, value in asked[1:]:
        if value != asked[0][1]:
            raise bad_request(f"{asked[0][0]} and {name} contradict each other about thinking.", name)
    return asked[0][1] if asked else None
