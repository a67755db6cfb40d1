"""Invented tools with random names and typed parameters: the model must copy them, it cannot know them by heart."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from models.kimi_k25.training.everyday_tools import Task, declare
from models.kimi_k25.training.made_words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    DAYS,
    FOODS,
    NAMES,
    NOUNS,
    SYLLABLES,
    THINGS,
    VERBS,
)


@dataclass(frozen=True)
class SyntheticTool:
    declaration: dict
    verb: str
    noun: str
    properties: dict[str, dict]


def invented_word(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 4)))


_KEYS = [
    "name",
    "title",
    "id",
    "count",
    "city",
    "date",
    "color",
    "size",
    "amount",
    "owner",
    "group",
    "level",
    "mode",
    "reason",
    "target",
    "source",
    "limit",
    "page",
    "label",
    "topic",
    "day",
    "price",
    "speed",
    "weight",
    "code",
    "status",
    "kind",
    "note",
    "text",
    "path",
    "user",
    "number",
]


def _property(rng: Random) -> dict[str, Any]:
    kind = rng.choice(("string", "string", "string", "integer", "integer", "number", "boolean", "enum"))
    if kind == "enum":
        return {
            "type": "string",
            "enum": rng.sample(rng.choice((COLORS, ADJECTIVES, DAYS, FOODS)), rng.randrange(2, 4)),
        }
    made: dict[str, Any] = {"type": kind}
    if rng.random() < 0.2:
        made["description"] = f"The {rng.choice(_KEYS)} of the {rng.choice(NOUNS)}"
    return made


def synthetic_tool(rng: Random) -> SyntheticTool:
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    if rng.random() < 0.35:
        noun = invented_word(rng)
    name = rng.choice(
        (f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}", f"{noun}_{verb}", f"{noun}.{verb}")
    )
    keys = rng.sample(_KEYS, rng.randrange(1, 4))
    if rng.random() < 0.25:
        keys[0] = invented_word(rng)
    properties = {key: _property(rng) for key in keys}
    required = [key for key in keys if rng.random() < 0.7] or keys[:1]
    return SyntheticTool(declare(name, f"{verb.capitalize()} a {noun}", properties, required), verb, noun, properties)


def _value(rng: Random, schema: dict) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randrange(0, rng.choice((10, 100, 1000)))
    if kind == "number":
        return rng.choice((rng.randrange(1, 100), round(rng.uniform(0, 100), 1)))
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(NAMES)
    if draw < 0.5:
        return rng.choice(CITIES)
    if draw < 0.8:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"
    return invented_word(rng)


def _spoken(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def synthetic_task(rng: Random) -> Task:
    """A request that names every argument, in the order of the declaration or another."""
    tool = synthetic_tool(rng)
    required = tool.declaration["function"]["parameters"]["required"]
    chosen = [key for key in tool.properties if key in required or rng.random() < 0.5]
    arguments = {key: _value(rng, tool.properties[key]) for key in chosen}
    listed = rng.choice((" and ", ", ")).join(
        rng.choice((f"{key} {_spoken(value)}", f"{key} = {_spoken(value)}", f"{key}: {_spoken(value)}"))
        for key, value in arguments.items()
    )
    form = rng.choice(
        (
            "{Verb} a {noun} with {args}.",
            "{Verb} the {noun}: {args}.",
            "Please {verb} the {noun} with {args}.",
            "Can you {verb} a {noun}? {args}.",
            "I want to {verb} a {noun}, {args}.",
            "Use {name} with {args}.",
        )
    )
    name = tool.declaration["function"]["name"]
    question = form.format(verb=tool.verb, Verb=tool.verb.capitalize(), noun=tool.noun, args=listed, name=name)
    result, answer = _outcome(rng, tool)
    return Task(tool.declaration, question, arguments, result, answer)


def _outcome(rng: Random, tool: SyntheticTool) -> tuple[dict, str]:
    number, word = rng.randrange(1, 1000), invented_word(rng)
    return rng.choice(
        (
            ({"ok": True}, f"Done. The {tool.noun} request worked."),
            ({"id": number}, f"Done. The id is {number}."),
            ({"status": word}, f"The status of the {tool.noun} is {word}."),
            ({"result": number}, f"The result is {number}."),
            ({"name": word, "count": number}, f"The tool found {word}, and the count is {number}."),
            ({"error": "not found"}, f"I am sorry, the {tool.noun} was not found."),
        )
    )
