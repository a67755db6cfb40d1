"""What a chat request says about tools before any is called: the declarations and `tool_choice`.

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
MAX_TOOLS = 1024
CHOICES = ("auto", "none", "required")
WANTED = (
    'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or OpenAI\'s '
    "allowed_tools."
)


def check_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> list[dict[str, Any]] | None:
    """The tools to render, None if there are none. Raises 400 for what is malformed.

    `tools: []` is no tools, but then a `tool_choice` makes no sense and is refused. Whatever the choice, all tools are
    rendered: calls earlier in the conversation stay explained, and the prompt's prefix stays the one already cached.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise bad_request(f"tools holds {len(tools)} tools; at most {MAX_TOOLS} are taken.", "tools")
    first: dict[str, int] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict):
            continue
        _check_function(function, f"tools[{i}].function")
        name = function.get("name")
        if isinstance(name, str) and first.setdefault(name, i) != i:
            where = f"tools[{i}].function.name"
            raise bad_request(f"{where} is {name!r}, as of tools[{first[name]}]; give each tool its own name.", where)
    if tool_choice is not None and tools == []:
        raise bad_request("tool_choice needs tools, but tools is empty.", "tool_choice")
    _read_choice(tool_choice, names_of(tools))
    return tools or None


def _check_function(function: dict[str, Any], where: str) -> None:
    name, strict = function.get("name"), function.get("strict")
    if isinstance(name, str) and not TOOL_NAME.fullmatch(name):
        raise bad_request(f"{where}.name must be 1 to 64 letters, digits and _ . : -", f"{where}.name")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{where}.strict must be true or false.", f"{where}.strict")


def names_of(tools: list[dict[str, Any]] | None) -> tuple[str, ...]:
    """The declared functions, each once."""
    functions = [tool.get("function") for tool in tools or ()]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def tool_rules(body: ChatFields) -> ToolRules:
    """What the answer may do with the request's tools. The messages must have been checked.

    Raises 400 for a `tool_choice` that makes no sense.
    """
    names = names_of(body.tools)
    choice, allowed = _read_choice(body.tool_choice, names)
    if not names:
        return ToolRules()
    name = allowed[0] if choice == "named" else None
    return ToolRules(allowed, choice, name, body.parallel_tool_calls is not False, next_call_number(body.messages))


def _read_choice(value: Any, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """(the choice, the functions that may be called)."""
    if value is None:
        return "auto", names
    if isinstance(value, str) and value in CHOICES:
        if value == "required" and not names:
            raise bad_request('tool_choice is "required", but there are no tools.', "tool_choice")
        return value, names
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return "named", (_declared(value, names, "tool_choice"),)
    if kind == "allowed_tools":
        return _allowed(value.get("allowed_tools", value), names)
    raise bad_request(WANTED, "tool_choice")


def _declared(entry: Any, names: tuple[str, ...], param: str) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request(WANTED, param)
    if name not in names:
        raise bad_request(f"tool_choice names the function {name[:64]!r}, which tools does not declare.", param)
    return name


def _allowed(value: Any, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """OpenAI's choice among a part of the tools."""
    mode, tools = (value.get("mode"), value.get("tools")) if isinstance(value, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise bad_request('allowed_tools needs a mode, "auto" or "required", and a list of tools.', "tool_choice")
    chosen = {_declared(entry, names, "tool_choice") for entry in tools}
    return mode, tuple(name for name in names if name in chosen)
