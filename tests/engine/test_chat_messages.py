"""What is wrong with messages and tools is named by its place."""

from __future__ import annotations

import pytest

from engine.chat_messages import prepare_messages, prepare_tools
from engine.errors import InvalidRequestError

ASK = [{"role": "user", "content": "Hi"}]
CALL = {"id": "functions.f:0", "type": "function", "function": {"name": "f"}}
FUNCTION = {"name": "ping", "description": "Is it there?", "parameters": {"type": "object", "properties": {}}}
BAD = [
    ("messages", None),
    ("messages", []),
    ("messages", {"role": "user"}),
    ("messages[0]", ["hi"]),
    ("messages[0].role", [{"content": "hi"}]),
    ("messages[0].role", [{"role": "root", "content": "hi"}]),
    ("messages[0].role", [{"role": ["user"], "content": "hi"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "system", "content": None}]),
    ("messages[1].content", [*ASK, {"role": "assistant", "content": 3}]),
    ("messages[0].content", [{"role": "user", "content": "\ud800"}]),
    ("messages[0].content[1]", [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "video"}]}]),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "hologram", "text": "x"}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text", "text": None}]}]),
    ("messages[0].name", [{"role": "user", "content": "", "name": 1}]),
    ("messages[0].tool_call_id", [{"role": "tool", "content": ""}]),
    ("messages[0].reasoning", [{"role": "assistant", "reasoning": {}}]),
    ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": {}}]),
    ("messages[0].tool_calls[0]", [{"role": "assistant", "tool_calls": ["x"]}]),
    ("messages[0].tool_calls[0]", [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]),
    ("messages[0].tool_calls[0].id", [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]),
    ("messages[0].tool_calls[0].function.name", [{"role": "assistant", "tool_calls": [{"id": "x", "function": {}}]}]),
    (
        "messages[0].tool_calls[0].function.arguments",
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": [1]}}]}],
    ),
    (
        "messages[0].tool_calls[0].function.arguments",
        [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {"x": float("nan")}}}]}],
    ),
]


@pytest.mark.parametrize(("param", "messages"), BAD)
def test_bad_messages_are_refused_by_place(param, messages):
    with pytest.raises(InvalidRequestError) as error:
        prepare_messages(messages)
    assert error.value.param == param and str(error.value).startswith(param)


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    ("param", "tools"),
    [
        ("tools", {}),
        ("tools[0]", ["f"]),
        ("tools[0]", [{"type": "magic"}]),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].function.name", [{"type": "function", "function": {"name": ""}}]),
        ("tools[0].function.description", [{"type": "function", "function": FUNCTION | {"description": 1}}]),
        ("tools[0].function.parameters", [{"type": "function", "function": FUNCTION | {"parameters": []}}]),
        ("tools[0]", [{"type": "function", "function": FUNCTION | {"parameters": nested(100_000)}}]),
        ("tools[0]", [{"type": "function", "function": FUNCTION | {"parameters": {"x": 10**5000}}}]),
        ("tools[0]", [{"type": "function", "function": FUNCTION | {"parameters": {"x": {1, 2}}}}]),
        ("tools[0]", [{"type": "function", "function": FUNCTION | {"parameters": {"\ud800": 1}}}]),
    ],
)
def test_bad_tools_are_refused_by_place(param, tools):
    with pytest.raises(InvalidRequestError) as error:
        prepare_tools(tools)
    assert error.value.param == param
