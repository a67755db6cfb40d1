"""openai-agents over chat completions."""

from __future__ import annotations

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel
from steps import INSTANT, PERSON, SUM, SUM_ANSWER, WEATHER, Target, run


class Person(BaseModel):
    name: str
    age: int
    city: str


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return '{"city": "Paris", "weather": "sunny"}'


def agent(target: Target, **options) -> Agent:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=target.base, api_key=target.key, max_retries=0, timeout=60)
    choice = options.pop("tool_choice", None)
    settings = ModelSettings(temperature=0, max_tokens=200, extra_body=INSTANT, tool_choice=choice)
    model = OpenAIChatCompletionsModel(model=target.model, openai_client=client)
    return Agent(name="Assistant", model=model, model_settings=settings, **options)


def text(target: Target) -> None:
    """Runner.run and Runner.run_streamed: the text"""
    assert asyncio.run(Runner.run(agent(target), SUM[0]["content"])).final_output == SUM_ANSWER

    async def stream() -> str:
        result = Runner.run_streamed(agent(target), SUM[0]["content"])
        async for _ in result.stream_events():
            continue
        return result.final_output

    assert asyncio.run(stream()) == SUM_ANSWER


def loop(target: Target) -> str:
    """the agent loop: a required call with a strict schema, its result, and an answer"""
    chosen = agent(target, tools=[get_weather], tool_choice="required")
    result = asyncio.run(Runner.run(chosen, WEATHER[0]["content"], max_turns=4))
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and result.final_output, kinds
    return str(result.final_output)


def output_type(target: Target) -> str:
    """output_type: a pydantic model through response_format"""
    result = asyncio.run(Runner.run(agent(target, output_type=Person), PERSON[0]["content"]))
    assert isinstance(result.final_output, Person)
    return str(result.final_output)


if __name__ == "__main__":
    run("openai-agents", [text, loop, output_type])
