"""pydantic-ai: an agent over OpenAIChatModel."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from steps import INSTANT, PERSON, SUM, SUM_ANSWER, WEATHER, Target, run

SETTINGS = {"temperature": 0, "max_tokens": 300, "extra_body": INSTANT}


class Person(BaseModel):
    name: str
    age: int
    city: str


def agent(target: Target, **options) -> Agent:
    provider = OpenAIProvider(base_url=target.base, api_key=target.key)
    return Agent(OpenAIChatModel(target.model, provider=provider), model_settings=SETTINGS, retries=0, **options)


def text(target: Target) -> None:
    """a text answer, plain and streamed, with usage"""
    done = agent(target).run_sync(SUM[0]["content"])
    assert done.output == SUM_ANSWER and done.usage.output_tokens > 0, done

    async def stream() -> str:
        async with agent(target).run_stream(SUM[0]["content"]) as run_:
            return await run_.get_output()

    assert asyncio.run(stream()) == SUM_ANSWER


def thinking(target: Target) -> None:
    """thinking becomes a ThinkingPart"""
    done = agent(target).run_sync(SUM[0]["content"], model_settings={"temperature": 0, "extra_body": {}})
    kinds = [part.part_kind for message in done.all_messages() for part in message.parts]
    assert done.output == SUM_ANSWER and "thinking" in kinds, kinds


def tools(target: Target) -> str:
    """a tool that the model calls, its result, and the answer to it"""
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        asked.append(city)
        return '{"weather": "sunny"}'

    done = agent(target, tools=[get_weather]).run_sync(WEATHER[0]["content"])
    assert asked == ["Paris"] and done.output, (asked, done)
    return done.output


def output_tool(target: Target) -> str:
    """output_type through a tool: tool_choice required with strict flags"""
    person = agent(target, output_type=ToolOutput(Person)).run_sync(PERSON[0]["content"]).output
    assert isinstance(person, Person)
    return str(person)


def native_output(target: Target) -> str:
    """output_type through response_format json_schema"""
    person = agent(target, output_type=NativeOutput(Person)).run_sync(PERSON[0]["content"]).output
    assert isinstance(person, Person)
    return str(person)


if __name__ == "__main__":
    run("pydantic-ai-slim", [text, thinking, tools, output_tool, native_output])
