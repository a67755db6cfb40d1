"""Checks the messages and tools of a chat and brings them to the one form that chat templates read.

Rules: `developer` is `system`; text parts are joined in order; null and unknown keys are dropped, since clients send
back whole messages as their SDK dumps them; `reasoning` is `reasoning_content`; a tool message loses its `name`, which
the template would print in place of "tool". Images, audio, video and files are refused, never fetched.
"""

from __future__ import annotations

import re
from typing import Any

from engine.server.errors import bad_request

ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:\-]{1,64}")


def normalise_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with `role`, `content` (a string or absent) and what else the role allows. Raises 400."""
    if not messages:
        raise bad_request("messages must not be empty.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}.", f"{where}.role")
    if message.get("partial") or message.get("function_call"):
        name = "partial" if message.get("partial") else "function_call"
        raise bad_request(f"{where}.{name} is not supported.", f"{where}.{name}")
    result: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = _content(message.get("content"), f"{where}.content", optional=role == "assistant")
    if content is not None:
        result["content"] = content
    if role == "assistant":
        result |= _assistant_fields(message, where)
    if role == "tool":
        result["tool_call_id"] = _string(message, "tool_call_id", where)
    elif message.get("name") is not None:
        result["name"] = _string(message, "name", where)
    return result


def _string(holder: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(holder.get(key), str):
        raise bad_request(f"{where}.{key} must be a string.", f"{where}.{key}")
    return holder[key]


def _content(content: Any, where: str, optional: bool) -> str | None:
    if isinstance(content, str):
        return content
    if optional and content in (None, []):
        return None
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} must be a string or a non-empty list of text parts.", where)
    return "".join(_text_part(part, f"{where}[{j}]") for j, part in enumerate(content))


def _text_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad_request(f'{where} must be an object such as {{"type": "text", "text": "..."}}.', where)
    if part["type"] != "text":
        raise bad_request(f"{where} has the type {part['type'][:40]!r}; this server takes text parts only.", where)
    return _string(part, "text", where)


def _assistant_fields(message: dict[str, Any], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key in ("reasoning_content", "reasoning"):
        if message.get(key) is not None and "reasoning_content" not in result:
            result["reasoning_content"] = _string(message, key, where)
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
    return result


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise bad_request(f"{where} must be an object with id and function.", where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise bad_request(f"{where}.function.arguments must be a string of JSON.", f"{where}.function.arguments")
    name = _string(function, "name", f"{where}.function")
    return {
        "id": _string(call, "id", where),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def check_tools(tools: list[dict[str, Any]] | None, tool_choice: Any) -> list[dict[str, Any]] | None:
    """The tools to render, None if there are none. Raises 400 for what is malformed or not supported yet.

    `tools: []` is no tools, but then a `tool_choice` makes no sense and is refused. With `tool_choice: "none"` the
    tools are rendered all the same: calls earlier in the conversation stay explained, and the prompt's prefix stays
    the one already cached.
    """
    for i, tool in enumerate(tools or ()):
        _check_tool(tool, f"tools[{i}]")
    if tool_choice is not None:
        _check_tool_choice(tool_choice)
        if tools == []:
            raise bad_request("tool_choice needs tools, but tools is empty.", "tool_choice")
    return tools or None


def _check_tool(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise bad_request(f'{where} must have the type "function" and an object function.', where)
    function = tool["function"]
    if not TOOL_NAME.fullmatch(_string(function, "name", f"{where}.function")):
        raise bad_request(
            f"{where}.function.name must be 1 to 64 letters, digits and _ . : -", f"{where}.function.name"
        )
    for key, kind in (("description", str), ("parameters", dict)):
        if function.get(key) is not None and not isinstance(function[key], kind):
            noun = "a string" if kind is str else "an object"
            raise bad_request(f"{where}.function.{key} must be {noun}.", f"{where}.function.{key}")


def _check_tool_choice(choice: Any) -> None:
    if choice in ("auto", "none"):
        return
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools")):
        raise bad_request('Only the tool_choice values "auto" and "none" are supported yet.', "tool_choice")
    raise bad_request('tool_choice must be "auto" or "none".', "tool_choice")
