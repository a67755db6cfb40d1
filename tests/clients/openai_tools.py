"""openai's own client: tools in all choice modes, streamed and not, and the round trip."""

from __future__ import annotations

import json
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel
from steps import ADD_TOOL, INSTANT, WEATHER, WEATHER_TOOL, Target, call_of_weather, run

TOOLS = [WEATHER_TOOL, ADD_TOOL]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


class GetWeather(BaseModel):
    """Get the weather in a city"""

    city: str
    unit: Literal["celsius", "fahrenheit"]


def ask(target: Target, **fields):
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0, timeout=60)
    defaults = {"model": target.model, "messages": WEATHER, "tools": TOOLS, "temperature": 0, "extra_body": INSTANT}
    return client.chat.completions.create(**defaults | fields)


def only_call(answer):
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1, choice
    return choice.message.tool_calls[0]


def automatic(target: Target) -> str:
    """tool_choice auto: the model calls by itself, with thinking and without"""
    for extra in (INSTANT, {}):
        call = only_call(ask(target, extra_body=extra))
        call_of_weather(call.function.name, call.function.arguments)
        assert call.id == "functions.get_weather:0", call.id
    return call.function.arguments


def none(target: Target) -> None:
    """tool_choice none: no calls, and no tool markup leaves as a call"""
    message = ask(target, tool_choice="none", max_tokens=60).choices[0].message
    assert not message.tool_calls, message


def required(target: Target) -> str:
    """tool_choice required and named: calls whose arguments fit the schema, whatever was asked"""
    greeting = [{"role": "user", "content": "Hello, who are you?"}]
    for extra in (INSTANT, {}):
        call = only_call(
            ask(target, tool_choice="required", messages=greeting, parallel_tool_calls=False, extra_body=extra)
        )
        assert call.function.name in ("get_weather", "add") and isinstance(json.loads(call.function.arguments), dict)
        call = only_call(ask(target, tool_choice=NAMED, messages=greeting, parallel_tool_calls=False, extra_body=extra))
        call_of_weather(call.function.name, call.function.arguments)
    return call.function.arguments


def round_trip(target: Target) -> str:
    """round trip: the message object and the result go back, the model answers; a second call counts on"""
    message = ask(target).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"city": "Paris", "weather": "sunny"}'}
    history = [*WEATHER, message, result]
    answer = ask(target, messages=history, max_tokens=60).choices[0]
    assert answer.finish_reason == "stop" and answer.message.content, answer
    again = [*history, answer.message, {"role": "user", "content": "What is the weather in Rome?"}]
    second = only_call(ask(target, messages=again, tool_choice=NAMED, parallel_tool_calls=False))
    assert second.id == "functions.get_weather:1", second.id
    return answer.message.content


def foreign_ids(target: Target) -> None:
    """a history with another provider's ids, content null and a reasoning field is understood"""
    call = {"id": "call_9f2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    history = [
        *WEATHER,
        {"role": "assistant", "content": None, "reasoning_content": "The tool fits.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_9f2", "content": '{"weather": "sunny"}'},
    ]
    assert ask(target, messages=history, max_tokens=60).choices[0].message.content


def streamed(target: Target) -> None:
    """streamed calls: dense indexes, the id once, pieces that add up to the arguments of the plain answer"""
    expected = only_call(ask(target))
    calls: dict[int, dict[str, str]] = {}
    for chunk in ask(target, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            call = calls.setdefault(piece.index, {"id": piece.id, "name": piece.function.name, "arguments": ""})
            call["arguments"] += piece.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert reason == "tool_calls" and list(calls) == [0], (reason, calls)
    function = expected.function
    assert calls[0] == {"id": expected.id, "name": function.name, "arguments": function.arguments}, calls


def strict_tools(target: Target) -> str:
    """parse() and the stream helper with a strict pydantic tool: parsed arguments"""
    client = OpenAI(base_url=target.base, api_key=target.key, max_retries=0, timeout=60).chat.completions
    tool = openai.pydantic_function_tool(GetWeather)
    fields = {"model": target.model, "messages": WEATHER, "tools": [tool], "temperature": 0, "extra_body": INSTANT}
    forced = fields | {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.parse(**forced).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather), call
    with client.stream(**forced) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(done) == 1 and isinstance(done[0].parsed_arguments, GetWeather), done
    return str(call.function.parsed_arguments)


if __name__ == "__main__":
    run("openai", [automatic, none, required, round_trip, foreign_ids, streamed, strict_tools])
