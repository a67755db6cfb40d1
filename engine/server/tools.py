"""What a chat request may say about tools before any is called: the declarations and `tool_choice`.

The rest of a tool and the messages are checked where the prompt is rendered (`engine.chat_messages`).
"""

from __future__ import annotations

import re
from typing import Any

from engine.call_ids import next_call_number
from engine.server.errors import bad_request
from engine.server.protocol import ChatFields
from engine.server.tool_rules import ToolRules

TOOL_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")


def check_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> list[dict[str, Any]] | None:
    """The tools to render, None if there are none. Raises 400 for what is malformed or not supported yet.

    `tools: []` is no tools, but then a `tool_choice` makes no sense and is refused. With `tool_choice: "none"` the
    tools are rendered all the same: calls earlier in the conversation stay explained, and the prompt's prefix stays
    the one already cached.
    """
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and not TOOL_NAME.fullmatch(name):
            where = f"tools[{i}].function.name"
            raise bad_request(f"{where} must be 1 to 64 letters, digits and _ . : -", where)
    if tool_choice is not None:
        _check_tool_choice(tool_choice)
        if tools == []:
            raise bad_request("tool_choice needs tools, but tools is empty.", "tool_choice")
    return tools or None


def tool_rules(body: ChatFields) -> ToolRules:
    """What the answer may do with tools. The request's tools, choice and messages must have been checked."""
    names = tuple(tool["function"]["name"] for tool in body.tools or ())
    choice = body.tool_choice or ("auto" if names else "none")
    return ToolRules(names, choice, first_number=next_call_number(body.messages))


def _check_tool_choice(choice: Any) -> None:
    if choice in ("auto", "none"):
        return
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools")):
        raise bad_request('Only the tool_choice values "auto" and "none" are supported yet.', "tool_choice")
    raise bad_request('tool_choice must be "auto" or "none".', "tool_choice")
