"""langchain-openai: ChatOpenAI with a base URL."""

from __future__ import annotations

import asyncio

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from steps import INSTANT, PERSON, SUM, SUM_ANSWER, WEATHER, Target, call_of_weather, run


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return f'{{"city": "{city}", "weather": "sunny"}}'


def model(target: Target, **options) -> ChatOpenAI:
    defaults = {"model": target.model, "base_url": target.base, "api_key": target.key, "temperature": 0}
    return ChatOpenAI(**defaults | {"max_retries": 0, "timeout": 60, "extra_body": INSTANT} | options)


def invoke(target: Target) -> None:
    """invoke, batch and ainvoke: text and usage"""
    chat = model(target, max_tokens=120)
    answer = chat.invoke("What is 17 + 25?")
    assert answer.content == SUM_ANSWER and answer.usage_metadata["output_tokens"] > 0, answer
    assert answer.response_metadata["finish_reason"] == "stop"
    assert [each.content for each in chat.batch([SUM, SUM])] == [SUM_ANSWER] * 2
    assert asyncio.run(chat.ainvoke(SUM)).content == SUM_ANSWER


def stream(target: Target) -> None:
    """stream with stream_usage=True: the text, and usage in the last chunk"""
    whole = None
    for chunk in model(target, stream_usage=True).stream(SUM):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == SUM_ANSWER and whole.usage_metadata["output_tokens"] > 0, whole


def thinking(target: Target) -> None:
    """with thinking on, the content holds the answer alone"""
    assert model(target, extra_body=None).invoke(SUM).content == SUM_ANSWER


def bind_tools(target: Target) -> str:
    """bind_tools with tool_choice any and by name, streamed too, and the result sent back"""
    for choice in ("any", "get_weather"):
        bound = model(target).bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke([HumanMessage(WEATHER[0]["content"])])
        (call,) = answer.tool_calls
        call_of_weather(call["name"], call["args"])
        whole = None
        for chunk in bound.stream(WEATHER):
            whole = chunk if whole is None else whole + chunk
        call_of_weather(whole.tool_calls[0]["name"], whole.tool_calls[0]["args"])
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    free = model(target, max_tokens=60).bind_tools([get_weather])
    last = free.invoke([HumanMessage(WEATHER[0]["content"]), answer, result])
    assert last.content, last
    return last.content


def automatic(target: Target) -> None:
    """bind_tools without a choice: the model calls by itself"""
    (call,) = model(target).bind_tools([get_weather]).invoke(WEATHER).tool_calls
    call_of_weather(call["name"], call["args"])


def structured(target: Target) -> None:
    """with_structured_output: json_schema, function_calling and json_mode, and a stream of it"""
    for method in ("json_schema", "function_calling", "json_mode"):
        person = model(target).with_structured_output(Person, method=method).invoke(PERSON)
        assert isinstance(person, Person), (method, person)
    strict = model(target).with_structured_output(Person, method="function_calling", strict=True)
    assert isinstance(strict.invoke(PERSON), Person)
    *_, last = model(target).with_structured_output(Person, method="json_schema").stream(PERSON)
    assert last.name, last


def old_completions(target: Target) -> None:
    """the text completion class"""
    old = OpenAI(model=target.model, base_url=target.base, api_key=target.key, temperature=0, max_tokens=8)
    assert old.invoke("The capital of France is")


if __name__ == "__main__":
    run("langchain-openai", [invoke, stream, thinking, old_completions, automatic, bind_tools, structured])
