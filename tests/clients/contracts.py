"""What a vendor of Kimi models is held to, asked with openai's client: errors that name the field, arguments that fit
their schema, honest token counts.

The cases are those that the public verifiers of Moonshot's models check, in our own words.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
from openai import OpenAI
from steps import INSTANT, SUM, WEATHER, WEATHER_TOOL, Target, run

BAD_CHOICES: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required"},
    {"tool_choice": "required", "tools": []},
    {"tool_choice": "sometimes", "tools": [WEATHER_TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "get_time"}}, "tools": [WEATHER_TOOL]},
    {"tool_choice": {"type": "function"}, "tools": [WEATHER_TOOL]},
)
BAD_VALUES: tuple[tuple[str, Any], ...] = (
    ("temperature", -0.1),
    ("temperature", 3),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("n", 0),
    ("presence_penalty", 9),
    ("frequency_penalty", -9),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("top_logprobs", 21),
)
BAD_FORMATS: tuple[Any, ...] = (
    {"type": "poem"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "a"}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
    "json",
)
_COLOURS = {"type": "string", "enum": ["red", "green", "blue"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "one_of_few": {"properties": {"colour": _COLOURS}, "required": ["colour"]},
    "numbers": {
        "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 9}, "exact": {"type": "boolean"}},
        "required": ["count", "exact"],
    },
    "a_list": {
        "properties": {"colours": {"type": "array", "items": _COLOURS, "minItems": 1, "maxItems": 3}},
        "required": ["colours"],
    },
    "nested": {
        "properties": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "colour": _COLOURS},
                "required": ["x", "colour"],
                "additionalProperties": False,
            },
            "note": {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
        },
        "required": ["place", "note"],
    },
    "a_reference": {
        "properties": {"first": {"$ref": "#/$defs/point"}, "second": {"$ref": "#/$defs/point"}},
        "required": ["first", "second"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    "nothing": {"properties": {}},
}


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "additionalProperties": False} | SCHEMAS[name]
    return {"type": "function", "function": {"name": name, "description": "Set it.", "parameters": schema}}


def ask(target: Target, **fields):
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0, timeout=60)
    return client.chat.completions.create(**{"model": target.model, "messages": SUM, "max_tokens": 400} | fields)


def refused(target: Target, param: str, **fields) -> None:
    try:
        ask(target, **fields)
    except openai.BadRequestError as error:
        assert (error.param or "").split(".")[0].split("[")[0] == param, (fields, error.body)
        assert set(error.body) == {"message", "type", "param", "code"}, error.body
        return
    raise AssertionError(f"{fields} was accepted")


def tool_choices(target: Target) -> str:
    """B047: a tool_choice that cannot be met is a 400 with param tool_choice"""
    for fields in BAD_CHOICES:
        for stream in (False, True):
            refused(target, "tool_choice", stream=stream, **fields)
    return f"{2 * len(BAD_CHOICES)} cases"


def sampling_values(target: Target) -> str:
    """B084: a sampling value out of range is a 400 that names the field"""
    for name, value in BAD_VALUES:
        refused(target, name, **{name: value})
    return f"{len(BAD_VALUES)} cases"


def response_formats(target: Target) -> str:
    """a response_format that makes no sense is a 400 with param response_format"""
    for value in BAD_FORMATS:
        refused(target, "response_format", response_format=value)
    return f"{len(BAD_FORMATS)} cases"


def prompt_tokens(target: Target) -> str:
    """B103: prompt_tokens is what /tokenize counts, streamed and not: tools, several turns, a reasoning history"""
    call = {"id": "functions.get_weather:0", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    history = [
        *WEATHER,
        {"role": "assistant", "content": "", "reasoning_content": "The tool fits.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    turns = [*SUM, {"role": "assistant", "content": "17 + 25 = 42."}, *WEATHER]
    cases = ({"messages": SUM}, {"messages": turns}, {"messages": history, "tools": [WEATHER_TOOL]})
    headers = {"Authorization": f"Bearer {target.key}"}
    for fields in cases:
        counted = httpx.post(f"{target.url}/tokenize", json=fields, headers=headers, timeout=60, trust_env=False)
        expected = counted.json()["count"]
        assert ask(target, **fields | {"max_tokens": 1}).usage.prompt_tokens == expected, fields
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
        *_, last = ask(target, **fields | options)
        assert last.usage.prompt_tokens == expected, fields
    return f"{2 * len(cases)} cases"


def call_of(answer) -> tuple[str, str, str]:
    choice = answer.choices[0]
    (call,) = choice.message.tool_calls
    return call.function.name, call.function.arguments, choice.finish_reason


def streamed_call(chunks) -> tuple[str, str, str]:
    name = arguments = reason = ""
    for chunk in chunks:
        choice = chunk.choices[0]
        for piece in choice.delta.tool_calls or []:
            assert piece.index == 0, piece
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        reason = choice.finish_reason or reason
    return name, arguments, reason


def arguments_fit(target: Target) -> str:
    """forced calls: arguments fit their schema at temperature 1, streamed and not, thinking and not"""
    tools = [tool(name) for name in SCHEMAS]
    for name in SCHEMAS:
        choice = {"type": "function", "function": {"name": name}}
        fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "seed": 11}
        calls = [call_of(ask(target, extra_body=extra, **fields)) for extra in (INSTANT, {})]
        for called, arguments, reason in calls:
            assert (called, reason) == (name, "tool_calls"), (called, reason, arguments)
            jsonschema.validate(json.loads(arguments), {"type": "object"} | SCHEMAS[name])
        assert streamed_call(ask(target, stream=True, extra_body=INSTANT, **fields)) == calls[0]
    return f"{3 * len(SCHEMAS)} calls"


def formats_fit(target: Target) -> str:
    """response_format json_schema: the content fits at temperature 1, thinking and not"""
    for name in SCHEMAS:
        schema = tool(name)["function"]["parameters"]
        form = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
        for extra in (INSTANT, {}):
            choice = ask(target, response_format=form, temperature=1, seed=5, extra_body=extra).choices[0]
            assert choice.finish_reason == "stop", choice
            jsonschema.validate(json.loads(choice.message.content), schema)
    return f"{2 * len(SCHEMAS)} answers"


if __name__ == "__main__":
    run("openai", [tool_choices, sampling_values, response_formats, prompt_tokens, arguments_fit, formats_fit])
