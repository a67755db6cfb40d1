"""instructor: pydantic models out of tools and response formats."""

from __future__ import annotations

from typing import Literal

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, ConfigDict
from steps import INSTANT, PERSON, WEATHER, Target, run


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a small model adds fields of its own


class Person(Closed):
    name: str
    age: int
    city: str


class Ticket(Closed):
    title: str
    priority: Literal["low", "high"]
    reporter: Person


class get_weather(BaseModel):  # the model knows tools by such names
    """Get the weather in a city"""

    city: str


def extract(target: Target, mode: Mode, kind: type, messages=PERSON):
    client = instructor.from_openai(OpenAI(base_url=target.base, api_key=target.key, max_retries=0), mode=mode)
    fields = {"model": target.model, "messages": messages, "temperature": 0, "max_tokens": 600}
    return client.chat.completions.create(response_model=kind, max_retries=0, extra_body=INSTANT, **fields)


def tools(target: Target) -> str:
    """TOOLS: a named tool choice, flat and nested"""
    person = extract(target, Mode.TOOLS, Person)
    assert isinstance(person, Person)
    return str(extract(target, Mode.TOOLS, Ticket))


def strict_tools(target: Target) -> str:
    """TOOLS_STRICT: the same with strict schemas"""
    return str(extract(target, Mode.TOOLS_STRICT, Ticket))


def json_mode(target: Target) -> str:
    """JSON: response_format json_object, the schema in the prompt alone"""
    return str(extract(target, Mode.JSON, Person))


def json_schema(target: Target) -> str:
    """JSON_SCHEMA: response_format json_schema, flat and nested"""
    assert isinstance(extract(target, Mode.JSON_SCHEMA, Person), Person)
    return str(extract(target, Mode.JSON_SCHEMA, Ticket))


def partial(target: Target) -> None:
    """create_partial: a stream of growing objects"""
    client = instructor.from_openai(OpenAI(base_url=target.base, api_key=target.key, max_retries=0), mode=Mode.TOOLS)
    fields = {"model": target.model, "messages": PERSON, "temperature": 0, "max_tokens": 200}
    *_, last = client.chat.completions.create_partial(response_model=Person, extra_body=INSTANT, **fields)
    assert last.name and last.city, last


def parallel(target: Target) -> str:
    """PARALLEL_TOOLS: several calls, as many as the model makes"""
    from collections.abc import Iterable

    calls = list(extract(target, Mode.PARALLEL_TOOLS, Iterable[get_weather], WEATHER))
    assert calls and isinstance(calls[0], get_weather), calls
    return str(calls)


if __name__ == "__main__":
    run("instructor", [tools, strict_tools, json_mode, json_schema, partial, parallel])
