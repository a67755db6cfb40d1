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
    KEYS,
    NAMES,
    NOUNS,
    SYLLABLES,
    THINGS,
    VERBS,
)

# The tool of the fixed evaluation prompt: the training text must not hold it in any spelling.
HELD_OUT_PAIR = {"reserve", "table"}


@dataclass(frozen=True)
class Vocabulary:
    """Words that names are made of; the wider it is, the less a name can be guessed from its parts."""

    verbs: tuple[str, ...] = tuple(VERBS)
    nouns: tuple[str, ...] = tuple(NOUNS)

    def verb(self, rng: Random) -> str:
        return invented_word(rng) if rng.random() < 0.12 else _front_heavy(rng, self.verbs)

    def noun(self, rng: Random) -> str:
        return invented_word(rng) if rng.random() < 0.15 else _front_heavy(rng, self.nouns)

    def verb_and_noun(self, rng: Random) -> tuple[str, str]:
        pair = self.verb(rng), self.noun(rng)
        return self.verb_and_noun(rng) if set(pair) == HELD_OUT_PAIR else pair


PLAIN = Vocabulary()


@dataclass(frozen=True)
class SyntheticTool:
    declaration: dict
    verb: str
    noun: str
    properties: dict[str, dict]

    @property
    def name(self) -> str:
        return self.declaration["function"]["name"]


def _front_heavy(rng: Random, words: tuple[str, ...]) -> str:
    """Common words stand first: half of the draws fall into the first quarter."""
    return words[int(len(words) * rng.random() ** 2)]


def invented_word(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 4)))


def article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def joined_name(rng: Random, verb: str, noun: str) -> str:
    """One of the spellings that interfaces use."""
    return rng.choice(
        (
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"{verb}{noun.capitalize()}",
            f"{verb}{noun.capitalize()}",
            f"{noun}_{verb}",
            f"{noun}.{verb}",
            f"{verb}-{noun}",
            f"{verb.capitalize()}{noun.capitalize()}",
        )
    )


def argument_name(rng: Random, vocabulary: Vocabulary) -> str:
    draw = rng.random()
    if draw < 0.2:
        return rng.choice(KEYS)
    if draw < 0.26:
        return f"{vocabulary.noun(rng)}_{rng.choice(KEYS)}"
    if draw < 0.3:
        return vocabulary.noun(rng) + rng.choice(KEYS).capitalize()
    if draw < 0.36:
        return vocabulary.verb(rng)
    return vocabulary.noun(rng) + ("s" if draw > 0.92 else "")


def _property(rng: Random, vocabulary: Vocabulary) -> dict[str, Any]:
    kind = rng.choice(("string",) * 7 + ("integer",) * 5 + ("number", "number", "boolean", "enum"))
    if kind == "enum":
        return {
            "type": "string",
            "enum": rng.sample(rng.choice((COLORS, ADJECTIVES, DAYS, FOODS)), rng.randrange(2, 4)),
        }
    made: dict[str, Any] = {"type": kind}
    if rng.random() < 0.1:
        made["description"] = f"The {rng.choice(KEYS)} of the {vocabulary.noun(rng)}"
    return made


def synthetic_tool(rng: Random, vocabulary: Vocabulary = PLAIN, like: SyntheticTool | None = None) -> SyntheticTool:
    """A tool with 1 to 3 parameters; one that is `like` another shares its verb or its noun."""
    verb, noun = vocabulary.verb_and_noun(rng)
    if like is not None:
        pair = (like.verb, noun) if rng.random() < 0.5 else (verb, like.noun)
        verb, noun = (verb, noun) if set(pair) == HELD_OUT_PAIR else pair
    keys = list({argument_name(rng, vocabulary): None for _ in range(rng.choice((1, 2, 2, 2, 3)))})
    properties = {key: _property(rng, vocabulary) for key in keys}
    required = [key for key in keys if rng.random() < 0.8] or keys[:1]
    about = rng.choice(
        (
            f"{verb.capitalize()} {article(noun)}",
            f"{verb.capitalize()} {article(noun)}",
            f"{verb.capitalize()} the {noun}",
            f"{verb.capitalize()} {article(noun)} in {article(vocabulary.noun(rng))}",
            f"{verb.capitalize()} {article(noun)} for a {rng.choice(THINGS)}",
            "",
        )
    )
    return SyntheticTool(declare(joined_name(rng, verb, noun), about, properties, required), verb, noun, properties)


def _text_value(rng: Random, vocabulary: Vocabulary) -> str:
    draw = rng.random()
    if draw < 0.3:
        return rng.choice(NAMES)
    if draw < 0.4:
        return rng.choice(CITIES)
    if draw < 0.55:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"
    if draw < 0.65:
        return f"{vocabulary.noun(rng)} {vocabulary.noun(rng)}"
    word = vocabulary.noun(rng)
    return word.capitalize() if draw > 0.88 else word


def made_value(rng: Random, schema: dict, vocabulary: Vocabulary = PLAIN) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema["type"]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "integer":
        return rng.randrange(0, rng.choice((10, 10, 100, 1000)))
    if kind == "number":
        return rng.choice((rng.randrange(1, 100), round(rng.uniform(0, 100), 1)))
    return _text_value(rng, vocabulary)


def spoken(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def listed_arguments(rng: Random, arguments: dict[str, Any]) -> str:
    """`name Omar and size 4`, or the same with signs between key and value."""
    form = rng.choice(("{} {}", "{} {}", "{} {}", "{} = {}", "{}: {}", "{} set to {}", '{} "{}"'))
    parts = [form.format(key, spoken(value)) for key, value in arguments.items()]
    if rng.random() < 0.25:
        return ", ".join(parts)
    return " and ".join([", ".join(parts[:-1])] * bool(parts[:-1]) + parts[-1:])


_FORMS = (
    "Please {verb} {a_noun} with {args}.",
    "Please {verb} {a_noun} with {args}.",
    "Please {verb} {a_noun} with {args}.",
    "Please {verb} the {noun} with {args}.",
    "{Verb} {a_noun} with {args}.",
    "{Verb} {a_noun}: {args}.",
    "{Verb} the {noun}, {args}.",
    "{verb} {noun} {args}",
    "Can you {verb} {a_noun}? {args}.",
    "Could you {verb} {a_noun} with {args}?",
    "I want to {verb} {a_noun} with {args}.",
    "I need to {verb} a {noun}, {args}.",
    "We have to {verb} the {noun}. Use {args}.",
    "Use {name} with {args}.",
    "Call {name} with {args}.",
)


def synthetic_task(rng: Random, vocabulary: Vocabulary = PLAIN) -> tuple[Task, SyntheticTool]:
    """A request that names every argument, which the call repeats in the same order; and the tool it needs."""
    tool = synthetic_tool(rng, vocabulary)
    required = tool.declaration["function"]["parameters"]["required"]
    chosen = [key for key in tool.properties if key in required or rng.random() < 0.5]
    arguments = {key: made_value(rng, tool.properties[key], vocabulary) for key in chosen}
    words = {"verb": tool.verb, "Verb": tool.verb.capitalize(), "noun": tool.noun, "a_noun": article(tool.noun)}
    question = rng.choice(_FORMS).format(**words, args=listed_arguments(rng, arguments), name=tool.name)
    result, answer = _outcome(rng, tool)
    return Task(tool.declaration, question, arguments, result, answer), tool


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
