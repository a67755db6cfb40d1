"""Eight everyday tools (weather, time, sums, search, timer, messages, music), each in several shapes and phrasings."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from models.kimi_k25.training.made_words import ADJECTIVES, CITIES, NAMES, SKIES, THINGS


@dataclass(frozen=True)
class Task:
    """A request that one call of `tool` answers."""

    tool: dict
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str

    @property
    def name(self) -> str:
        return self.tool["function"]["name"]


def declare(name: str, description: str, properties: dict[str, dict], required: list[str] | None = None) -> dict:
    """An OpenAI tool; every property is required unless `required` says otherwise."""
    parameters = {"type": "object", "properties": properties}
    parameters["required"] = list(properties) if required is None else required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _string(description: str = "") -> dict:
    return {"type": "string", "description": description} if description else {"type": "string"}


_NUMBER = {"type": "number"}
EVERYDAY = {
    tool["function"]["name"]: tool
    for tool in (
        declare("get_weather", "Get the weather in a city", {"city": _string("City name")}),
        declare("add", "Add two numbers", {"a": _NUMBER, "b": _NUMBER}),
        declare("multiply", "Multiply two numbers", {"a": _NUMBER, "b": _NUMBER}),
        declare("search", "Search the web for a text", {"query": _string()}),
        declare("get_time", "Get the current time in a city", {"city": _string()}),
        declare("set_timer", "Set a timer", {"minutes": {"type": "integer"}}),
        declare("send_message", "Send a message to a person", {"to": _string(), "text": _string()}),
        declare("play_music", "Play a song", {"title": _string("Song title")}),
    )
}
_WEATHER_NAMES = ("get_weather", "get_weather", "get_current_weather", "weather", "getWeather", "weather_lookup")
_PLACE_KEYS = ("city", "city", "location", "location", "place", "town")


def everyday_task(rng: Random) -> Task:
    return rng.choice((_weather, _weather, _weather, _time, _sum, _search, _timer, _message, _music))(rng)


def _weather(rng: Random) -> Task:
    """The tool that everybody tries first, so its name, its keys and its options vary the most."""
    city, degrees, sky = rng.choice(CITIES), rng.randrange(-10, 38), rng.choice(SKIES)
    question = rng.choice(
        (
            "What is the weather in {}?",
            "What's the weather in {}?",
            "How is the weather in {}?",
            "Is it warm in {} today?",
            "Weather in {}?",
            "what is the weather like in {}",
            "Tell me the weather in {}.",
            "Will it rain in {}?",
            "What is the weather in {} today?",
            "Is it cold in {}?",
            "Can you check the weather in {}?",
            "How warm is it in {}?",
            "What's the weather like in {} right now?",
            "Use the tool to get the weather in {}.",
            "Do I need a coat in {}?",
        )
    ).format(city)
    key = rng.choice(_PLACE_KEYS)
    arguments: dict[str, Any] = {key: city}
    properties = {key: _string(rng.choice(("", "City name", "The city, e.g. Paris", "Name of the city")))}
    if rng.random() < 0.4:
        unit = rng.choice(("celsius", "fahrenheit"))
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.4:
            question = question.rstrip("?.") + f" in {unit}" + question[-1]
            arguments["unit"] = unit
    name = rng.choice(_WEATHER_NAMES)
    about = rng.choice(
        (
            "Get the weather in a city",
            "Look up the current weather",
            "Get current weather for a location",
            "Current weather",
        )
    )
    tool = declare(name, about, properties, [key]) if rng.random() < 0.7 else EVERYDAY["get_weather"]
    if tool is EVERYDAY["get_weather"]:
        question, arguments = question.replace(" in celsius", "").replace(" in fahrenheit", ""), {"city": city}
    result = rng.choice(
        (
            {"temperature": degrees, "sky": sky},
            {"temp": degrees, "condition": sky},
            {"city": city, "temperature": degrees, "weather": sky},
        )
    )
    answer = rng.choice(
        (
            f"It is {sky} in {city}, with {degrees} degrees.",
            f"The weather in {city} is {sky} and it is {degrees} degrees.",
        )
    )
    return Task(tool, question, arguments, result, answer)


def _time(rng: Random) -> Task:
    city, time = rng.choice(CITIES), f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
    question = rng.choice(("What time is it in {}?", "Tell me the time in {}.", "What is the time in {} now?")).format(
        city
    )
    return Task(EVERYDAY["get_time"], question, {"city": city}, {"time": time}, f"It is {time} in {city}.")


def _sum(rng: Random) -> Task:
    name, a, b = rng.choice(("add", "multiply")), rng.randrange(2, 999), rng.randrange(2, 999)
    value = a + b if name == "add" else a * b
    sign = "+" if name == "add" else "*"
    question = rng.choice(
        (
            f"Use the tool to {name} {a} and {b}.",
            f"What is {a} {sign} {b}? Use the tool.",
            f"Please {name} {a} and {b} with the tool.",
        )
    )
    return Task(EVERYDAY[name], question, {"a": a, "b": b}, {"result": value}, f"The result is {value}.")


def _search(rng: Random) -> Task:
    query = f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}s"
    found = rng.randrange(1, 60)
    question = rng.choice(
        ("Search for {}.", "Look up {} on the web.", "Can you search for {}?", "Find {} online.")
    ).format(query)
    return Task(
        EVERYDAY["search"], question, {"query": query}, {"results": found}, f"I found {found} results for {query}."
    )


def _timer(rng: Random) -> Task:
    minutes = rng.randrange(1, 90)
    question = rng.choice(
        ("Set a timer for {} minutes.", "Start a {} minute timer.", "Remind me in {} minutes.")
    ).format(minutes)
    return Task(
        EVERYDAY["set_timer"],
        question,
        {"minutes": minutes},
        {"ok": True},
        f"I have set a timer for {minutes} minutes.",
    )


def _message(rng: Random) -> Task:
    name = rng.choice(NAMES)
    text = rng.choice(
        (
            "I will be late",
            "See you soon",
            "Dinner is ready",
            "Happy birthday",
            "Thank you",
            "I am at home",
            "Call me",
            f"Bring the {rng.choice(THINGS)}",
        )
    )
    question = rng.choice((f"Tell {name}: {text}.", f"Send {name} a message: {text}.", f'Write "{text}" to {name}.'))
    return Task(
        EVERYDAY["send_message"],
        question,
        {"to": name, "text": text},
        {"sent": True},
        f"I have sent your message to {name}.",
    )


def _music(rng: Random) -> Task:
    title = f"The {rng.choice(ADJECTIVES).capitalize()} {rng.choice(THINGS).capitalize()}"
    question = rng.choice((f"Play the song {title}.", f"Play {title}.", f"I want to hear {title}."))
    return Task(EVERYDAY["play_music"], question, {"title": title}, {"playing": True}, f"Now playing {title}.")
