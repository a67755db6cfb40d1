"""Checks a caller's chat messages and tools and brings them to the one form that chat templates of the family expect.

Whatever is wrong is an InvalidRequestError that names the place, as in `messages[2].content[0]`. Knows no templates.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from engine.call_ids import rename_calls
from engine.errors import InvalidRequestError
from engine.tokenizer import check_encodable

ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA_PARTS = ("image", "image_url", "video", "video_url", "input_audio", "audio", "audio_url", "file", "input_image")
MAX_NESTING = 100
# Python refuses to print whole numbers of more than 4,300 digits.
MAX_INTEGER_BITS = 4096


def prepare_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as new dicts of the keys role, content, name, reasoning_content, tool_calls, tool_call_id alone.

    Null values and unknown keys are dropped, `developer` becomes `system`, `reasoning` becomes `reasoning_content`,
    tool messages lose their `name`, which the template would print in place of the role, and calls with foreign ids
    are renamed to Kimi's form.
    """
    if not isinstance(messages, list) or not messages:
        _fail("messages", "must be a list of at least one message.")
    prepared = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    rename_calls(prepared)
    return prepared


def prepare_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools, checked; [] for None."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        _fail("tools", "must be a list of tools.")
    for i, tool in enumerate(tools):
        place = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            _fail(place, 'must be an object with "type": "function".')
        function = tool.get("function")
        if not isinstance(function, dict):
            _fail(f"{place}.function", "must be an object.")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            _fail(f"{place}.function.name", "must be a non-empty string.")
        for key, kind in (("description", str), ("parameters", dict)):
            if not isinstance(function.get(key), kind | None):
                _fail(f"{place}.function.{key}", f"must be {'a string' if kind is str else 'an object'}.")
        check_json(tool, place)
    return tools


def check_json(value: Any, place: str, level: int = 0) -> None:
    """Raises InvalidRequestError unless `value` is finite JSON of at most MAX_NESTING levels in valid Unicode."""
    if level > MAX_NESTING:
        _fail(place, f"is nested more than {MAX_NESTING} levels deep.")
    if isinstance(value, str):
        _text(value, place)
    elif isinstance(value, list):
        for item in value:
            check_json(item, place, level + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _text(key, place)
            check_json(item, place, level + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            _fail(place, f"holds {value}, which JSON cannot express.")
    elif isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            _fail(place, f"holds a whole number of more than {MAX_INTEGER_BITS} bits.")
    elif value is not None:
        _fail(place, f"holds a {type(value).__name__}, which is not JSON.")


def _fail(place: str, problem: str) -> NoReturn:
    raise InvalidRequestError(f"{place} {problem}", param=place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        _fail(place, "must be a string.")
    try:
        check_encodable(value)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place}: {error}", param=place) from None
    return value


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _fail(place, "must be an object with a role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _fail(f"{place}.role", f"must be one of {', '.join(ROLES)}.")
    role = "system" if role == "developer" else role
    given = {key: value for key, value in message.items() if value is not None}
    prepared = {"role": role, "content": _content(given, role, place)}
    if role != "tool" and given.get("name", "") != "":
        prepared["name"] = _text(given["name"], f"{place}.name")
    if role == "tool":
        prepared["tool_call_id"] = _text(given.get("tool_call_id"), f"{place}.tool_call_id")
    if role == "assistant":
        prepared.update(_assistant_fields(given, place))
    return prepared


def _content(given: dict, role: str, place: str) -> str | list[dict[str, str]]:
    """A string stays as it is, null becomes "" where an answer may be empty, parts keep their order."""
    place = f"{place}.content"
    content = given.get("content", "" if role in ("assistant", "tool") else None)
    if isinstance(content, list):
        return [_part(part, f"{place}[{i}]") for i, part in enumerate(content)]
    if not isinstance(content, str):
        _fail(place, "must be a string or a list of text parts.")
    return _text(content, place)


def _part(part: Any, place: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {"type": "text", "text": _text(part.get("text"), f"{place}.text")}
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        _fail(place, f"is of type {kind}, but this server reads text only.")
    _fail(place, 'must be a text part: {"type": "text", "text": ...}.')


def _assistant_fields(given: dict, place: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key in ("reasoning_content", "reasoning"):
        if key in given:
            fields["reasoning_content"] = _text(given[key], f"{place}.{key}")
            break
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list):
        _fail(f"{place}.tool_calls", "must be a list.")
    if calls:
        fields["tool_calls"] = [_tool_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return fields


def _tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") not in ("function", None):
        _fail(place, 'must be an object with "type": "function", an id and a function.')
    arguments = function.get("arguments")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, str | dict):
        _fail(f"{place}.function.arguments", "must be a JSON string or an object.")
    check_json(arguments, f"{place}.function.arguments")
    name = _text(function.get("name"), f"{place}.function.name")
    call_id = _text(call.get("id"), f"{place}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
