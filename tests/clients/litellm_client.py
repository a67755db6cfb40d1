"""litellm: the providers hosted_vllm, openai and moonshot against one server."""

from __future__ import annotations

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm's own switch against fetching a price list

import litellm
from pydantic import BaseModel
from steps import INSTANT, PERSON, SUM, SUM_ANSWER, WEATHER, WEATHER_TOOL, Target, call_of_weather, run

PROVIDERS = ("hosted_vllm", "openai", "moonshot")


class Person(BaseModel):
    name: str
    age: int
    city: str


def ask(target: Target, provider: str, **fields):
    defaults = {"messages": SUM, "temperature": 0, "max_tokens": 120, "extra_body": INSTANT, "num_retries": 0}
    where = {"model": f"{provider}/{target.model}", "api_base": target.base, "api_key": target.key}
    return litellm.completion(**where, **defaults | fields)


def chat(target: Target) -> None:
    """chat through hosted_vllm/, openai/ and moonshot/"""
    for provider in PROVIDERS:
        answer = ask(target, provider)
        assert answer.choices[0].message.content == SUM_ANSWER, (provider, answer)
        assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens > 0


def reasoning(target: Target) -> None:
    """thinking arrives as reasoning_content, streamed and not"""
    for provider in PROVIDERS:
        message = ask(target, provider, extra_body={}).choices[0].message
        assert message.content == SUM_ANSWER and "Result 42" in message.reasoning_content, (provider, message)
        chunks = ask(target, provider, extra_body={}, stream=True)
        thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
        assert thought == message.reasoning_content, (provider, thought)


def stream(target: Target) -> None:
    """streams with include_usage, plain and async"""

    async def joined(provider: str) -> str:
        where = {"model": f"{provider}/{target.model}", "api_base": target.base, "api_key": target.key}
        chunks = await litellm.acompletion(**where, messages=SUM, temperature=0, stream=True, extra_body=INSTANT)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    for provider in PROVIDERS:
        chunks = list(ask(target, provider, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SUM_ANSWER, provider
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens > 0
        assert asyncio.run(joined(provider)) == SUM_ANSWER, provider


def tools(target: Target) -> None:
    """tools: a named choice, streamed and not, and the result sent back"""
    forced = {"type": "function", "function": {"name": "get_weather"}}
    for provider in PROVIDERS:
        fields = {"messages": WEATHER, "tools": [WEATHER_TOOL], "tool_choice": forced}
        message = ask(target, provider, **fields).choices[0].message
        call = message.tool_calls[0]
        call_of_weather(call.function.name, call.function.arguments)
        rebuilt = litellm.stream_chunk_builder(list(ask(target, provider, stream=True, **fields)))
        again = rebuilt.choices[0].message.tool_calls[0]
        call_of_weather(again.function.name, again.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"city": "Paris", "weather": "sunny"}'}
        history = [*WEATHER, message.model_dump(), result]
        assert ask(target, provider, messages=history, tools=[WEATHER_TOOL]).choices[0].message.content


def moonshot_required(target: Target) -> None:
    """moonshot/ with tool_choice required, which it may turn into an extra message"""
    message = ask(target, "moonshot", messages=WEATHER, tools=[WEATHER_TOOL], tool_choice="required").choices[0].message
    call_of_weather(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)


def parts(target: Target) -> None:
    """content as text parts, and a system and a developer message"""
    system = [{"role": role, "content": [{"type": "text", "text": "Be brief."}]} for role in ("system", "developer")]
    user = {"role": "user", "content": [{"type": "text", "text": "What is 17 + 25?"}]}
    for provider in PROVIDERS:
        assert ask(target, provider, messages=[*system, user]).choices[0].message.content, provider


def structured(target: Target) -> None:
    """response_format from a pydantic model"""
    for provider in PROVIDERS:
        answer = ask(target, provider, messages=PERSON, response_format=Person)
        assert Person.model_validate_json(answer.choices[0].message.content).name, (provider, answer)


def errors(target: Target) -> None:
    """a bad value, an unknown model and a wrong key become litellm's own exceptions"""
    cases = (
        ({"temperature": 9}, litellm.BadRequestError),
        ({"model": "hosted_vllm/no-such-model"}, litellm.NotFoundError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
    )
    defaults = {"model": f"hosted_vllm/{target.model}", "api_base": target.base, "api_key": target.key}
    for fields, kind in cases:
        try:
            litellm.completion(**defaults | {"messages": SUM, "max_tokens": 4, "num_retries": 0} | fields)
        except kind:
            continue
        raise AssertionError(f"{fields} did not raise {kind.__name__}")


def text_completion(target: Target) -> str:
    """text completions"""
    where = {"model": f"text-completion-openai/{target.model}", "api_base": target.base, "api_key": target.key}
    answer = litellm.text_completion(**where, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert answer.choices[0].text, answer
    return json.dumps(answer.choices[0].text)


if __name__ == "__main__":
    run("litellm", [chat, reasoning, stream, parts, errors, text_completion, tools, moonshot_required, structured])
