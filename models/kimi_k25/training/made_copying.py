"""Drills in copying: identifiers and values repeated as text, as JSON, and out of tool declarations."""

from __future__ import annotations

import json
from random import Random

from models.kimi_k25.training.documents import Document, Exchange, conversation, pick_system
from models.kimi_k25.training.everyday_tools import EVERYDAY
from models.kimi_k25.training.synthetic_tools import (
    Vocabulary,
    argument_name,
    joined_name,
    listed_arguments,
    made_value,
    synthetic_tool,
)


def _identifier(rng: Random, vocabulary: Vocabulary) -> str:
    return joined_name(rng, *vocabulary.verb_and_noun(rng))


def _repeat(rng: Random, vocabulary: Vocabulary) -> Exchange:
    name = _identifier(rng, vocabulary)
    question, answer = rng.choice(
        (
            (f"Repeat this identifier: {name}", name),
            (f"Write {name} again.", name),
            (f"Copy the name {name}.", name),
            (f"Put {name} in quotes.", f'"{name}"'),
            (f"Write functions.{name} without the prefix.", name),
            (f"Write {name} with the prefix functions.", f"functions.{name}"),
            (f"Write a call of {name} without arguments.", f"{name}()"),
            (f"Write {name} as a JSON string.", f'"{name}"'),
        )
    )
    return Exchange(question, answer, f"The identifier is {name}.")


def _join(rng: Random, vocabulary: Vocabulary) -> Exchange:
    verb, noun = vocabulary.verb_and_noun(rng)
    how, answer = rng.choice(
        (
            ("an underscore", f"{verb}_{noun}"),
            ("a dot", f"{verb}.{noun}"),
            ("a hyphen", f"{verb}-{noun}"),
            ("camel case", f"{verb}{noun.capitalize()}"),
        )
    )
    return Exchange(f"Join {verb} and {noun} with {how}.", answer, f"The words are {verb} and {noun}.")


def _keys(rng: Random, vocabulary: Vocabulary, most: int = 4) -> list[str]:
    return list({argument_name(rng, vocabulary): None for _ in range(rng.randrange(1, most))})


def _json_list(rng: Random, vocabulary: Vocabulary) -> Exchange:
    words = _keys(rng, vocabulary, 6)
    form = rng.choice(("Write as a JSON list: {}", "Make a JSON list of {}.", "Put {} into a JSON list."))
    return Exchange(form.format(", ".join(words)), json.dumps(words), f"The words are {', '.join(words)}.")


def _json_object(rng: Random, vocabulary: Vocabulary) -> Exchange:
    kinds = ("string", "string", "integer", "boolean")
    values = {key: made_value(rng, {"type": rng.choice(kinds)}, vocabulary) for key in _keys(rng, vocabulary)}
    form = rng.choice(("Write a JSON object with {}.", "Give me JSON with {}.", "As JSON: {}", "JSON object: {}."))
    return Exchange(
        form.format(listed_arguments(rng, values)), json.dumps(values), f"The keys are {', '.join(values)}."
    )


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])


def _declared(rng: Random, tools: list[dict]) -> Exchange:
    names = [tool["function"]["name"] for tool in tools]
    function = rng.choice(tools)["function"]
    name, parameters = function["name"], function["parameters"]
    keys = list(parameters["properties"])
    key = rng.choice(keys)
    kind = {"integer": "number"}.get(parameters["properties"][key]["type"], parameters["properties"][key]["type"])
    arguments = f"{_and(sorted(keys))}"
    forms = [
        (rng.choice(("Which tools do you have?", "List your tools.", "What tools can you call?")), _and(names) + "."),
        (f"Which arguments does {name} take?", f"{name} takes {arguments}."),
        (f"What are the arguments of {name}?", f"The arguments of {name} are {arguments}."),
        (f"Name the arguments of {name} as a JSON list.", json.dumps(sorted(keys))),
        (f"What type is {key} in {name}?", f"{key} is a {kind}."),
        (f"Which tool has the argument {key}?", f"{name} has {key}."),
        (f"Is {key} required in {name}?", "Yes." if key in parameters["required"] else "No, it is optional."),
    ]
    question, answer = rng.choice(forms)
    if (
        question.startswith("Which tool has")
        and sum(key in t["function"]["parameters"]["properties"] for t in tools) > 1
    ):
        question, answer = forms[1]
    return Exchange(question, answer, f"The tools are {_and(names)}.")


def copying_document(rng: Random, vocabulary: Vocabulary) -> Document:
    """One to three drills; four in ten ask about declared tools."""
    count = rng.choice((1, 2, 2, 3))
    if rng.random() < 0.4:
        tools = {tool.name: tool.declaration for tool in (synthetic_tool(rng, vocabulary) for _ in range(count))}
        if rng.random() < 0.1:
            tools |= {"get_weather": EVERYDAY["get_weather"]}
        declared = list(tools.values())
        exchanges = [_declared(rng, declared) for _ in range(rng.choice((1, 1, 2)))]
        return conversation("copying", rng, exchanges, pick_system(rng, 0.1), declared)
    drills = (_repeat, _repeat, _join, _json_list, _json_object, _json_object)
    return conversation(
        "copying", rng, [rng.choice(drills)(rng, vocabulary) for _ in range(count)], pick_system(rng, 0.1)
    )
