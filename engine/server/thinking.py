"""One switch for thinking, in every spelling in use; an unknown spelling or a contradiction is a 400."""

from __future__ import annotations

from collections.abc import Iterator

from engine.chat_template import ChatTemplate
from engine.errors import InvalidRequestError
from engine.server.errors import bad_request
from engine.server.protocol import EFFORTS, ChatFields

TYPES = ("enabled", "disabled")
KEY = "thinking"  # what the template calls it


def _spellings(body: ChatFields) -> Iterator[tuple[str, bool]]:
    """(field, value) of each top-level field that turns thinking on or off."""
    if body.thinking is not None:
        if body.thinking.get("type") not in TYPES or len(body.thinking) > 1:
            raise bad_request('thinking must be {"type": "enabled"} or {"type": "disabled"}.', "thinking")
        yield "thinking", body.thinking["type"] == "enabled"
    if body.enable_thinking is not None:
        yield "enable_thinking", body.enable_thinking
    if body.reasoning_effort is not None:
        if body.reasoning_effort not in EFFORTS:
            raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
        yield "reasoning_effort", body.reasoning_effort != "none"


def template_switches(body: ChatFields, template: ChatTemplate) -> dict[str, bool]:
    """The template's switches as the request sets them; `thinking` is absent if the template's default holds."""
    switches = template.check_switches(body.chat_template_kwargs)
    for name, value in _spellings(body):
        try:
            template.check_switches({KEY: value})
        except InvalidRequestError:
            raise bad_request(f"{name} has no effect: this model's template cannot switch thinking.", name) from None
        if switches.setdefault(KEY, value) != value:
            raise bad_request(f"{name} contradicts another field about thinking.", name)
    return switches
