"""Answers in JSON: named keys, facts taken from a sentence, and objects that follow a schema given in the prompt."""

from __future__ import annotations

import json
from random import Random

from models.kimi_k25.training.documents import Exchange
from models.kimi_k25.training.made_words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    NOUNS,
    THINGS,
)

_ONLY = ("", "", " Answer only in JSON.", " Reply with JSON only.", " Return only the JSON.")
_FIELDS = {
    "name": lambda r: r.choice(NAMES),
    "age": lambda r: r.randrange(5, 90),
    "city": lambda r: r.choice(CITIES),
    "job": lambda r: r.choice(JOBS),
    "hobby": lambda r: r.choice(HOBBIES),
    "color": lambda r: r.choice(COLORS),
    "price": lambda r: r.choice((r.randrange(1, 200), round(r.uniform(1, 99), 2))),
    "title": lambda r: f"The {r.choice(ADJECTIVES).capitalize()} {r.choice(THINGS).capitalize()}",
    "count": lambda r: r.randrange(0, 50),
    "in_stock": lambda r: r.random() < 0.5,
    "active": lambda r: r.random() < 0.5,
    "food": lambda r: r.choice(FOODS),
    "year": lambda r: r.randrange(1950, 2030),
    "item": lambda r: r.choice(THINGS),
    "tags": lambda r: r.sample(ADJECTIVES, r.randrange(1, 4)),
    "email": lambda r: f"{r.choice(NAMES).lower()}@example.com",
    "id": lambda r: r.randrange(1, 1000),
    "score": lambda r: r.randrange(0, 101),
    "country": lambda r: r.choice(("France", "Japan", "Brazil", "Kenya", "Canada", "India", "Spain", "Norway")),
}
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def _dump(rng: Random, value) -> str:
    return json.dumps(value, indent=2 if rng.random() < 0.15 else None)


def _person(rng: Random) -> Exchange:
    name, age, city, job = rng.choice(NAMES), rng.randrange(5, 90), rng.choice(CITIES), rng.choice(JOBS)
    value = {"name": name, "age": age, "city": city}
    sentence = f"{name} is {age} years old and lives in {city}."
    if rng.random() < 0.4:
        sentence, value = f"{name} is a {job} from {city} and is {age} years old.", value | {"job": job}
    keys = ", ".join(value)
    form = rng.choice(
        (
            "Give me a JSON object with {keys}: {text}",
            "Extract {keys} as JSON: {text}",
            "Turn this into JSON with the keys {keys}: {text}",
            "{text} Write this as a JSON object with {keys}.",
        )
    )
    return Exchange(
        form.format(keys=keys, text=sentence), _dump(rng, value), f"The keys are {keys}. The text is about {name}."
    )


def _free_object(rng: Random) -> Exchange:
    """The user names keys only; the values are made up."""
    keys = rng.sample(list(_FIELDS), rng.randrange(2, 5))
    value = {key: _FIELDS[key](rng) for key in keys}
    listed = ", ".join(keys[:-1]) + " and " + keys[-1]
    form = rng.choice(
        (
            "Give me a JSON object with {keys}.",
            "Write a JSON object with the keys {keys}.",
            "Make up a JSON object that has {keys}.",
            "I need an example JSON with {keys}.",
            "Give me a JSON object with the fields {keys}.",
            "Create JSON with {keys}.",
        )
    )
    reasoning = f"The user wants a JSON object. The keys are {listed}."
    return Exchange(form.format(keys=listed) + rng.choice(_ONLY), _dump(rng, value), reasoning)


def _about(rng: Random) -> Exchange:
    topic, keys = rng.choice(
        (
            ("a person", ["name", "age", "city"]),
            ("a user", ["id", "name", "email", "active"]),
            ("a book", ["title", "year", "price"]),
            ("a product", ["item", "price", "in_stock"]),
            ("a city", ["city", "country"]),
            ("a meal", ["food", "price"]),
        )
    )
    form = rng.choice(("Give me a JSON object about {}.", "Describe {} in JSON.", "Give me a JSON object for {}."))
    value = {key: _FIELDS[key](rng) for key in keys}
    return Exchange(form.format(topic), _dump(rng, value), f"I will describe {topic} with {', '.join(keys)}.")


def _schema(rng: Random) -> Exchange:
    """The object must follow a JSON schema written in the prompt."""
    keys = rng.sample(list(_FIELDS), rng.randrange(1, 5))
    if rng.random() < 0.4:
        keys = [f"{rng.choice(ADJECTIVES)}_{rng.choice(NOUNS)}" for _ in keys]
        value = {key: rng.choice((rng.randrange(100), rng.choice(THINGS), rng.random() < 0.5)) for key in keys}
    else:
        value = {key: _FIELDS[key](rng) for key in keys}
    properties = {key: {"type": _TYPES[type(v)]} for key, v in value.items()}
    schema = json.dumps({"type": "object", "properties": properties, "required": list(value)})
    form = rng.choice(
        (
            "Give me a JSON object that follows this schema: {}",
            "Answer with JSON for this schema: {}",
            "Write one example for this JSON schema: {}",
            "Return JSON that matches this schema:\n{}",
        )
    )
    return Exchange(form.format(schema), json.dumps(value), f"The schema has the keys {', '.join(value)}.")


def _list_and_numbers(rng: Random) -> Exchange:
    if rng.random() < 0.5:
        items = rng.sample(THINGS, rng.randrange(2, 6))
        question = f"List these items as JSON: {', '.join(items)}." + rng.choice(_ONLY)
        if rng.random() < 0.5:
            return Exchange(
                question, json.dumps({"items": items, "count": len(items)}), f"There are {len(items)} items."
            )
        return Exchange(question.replace("as JSON", "as a JSON array"), json.dumps(items), "I will write an array.")
    x, y = rng.randrange(1, 50), rng.randrange(1, 50)
    value = {"a": x, "b": y, "sum": x + y}
    return Exchange(
        f"Return JSON with the keys a, b and sum for {x} and {y}.", json.dumps(value), f"{x} + {y} = {x + y}."
    )


_GOOD = (
    "I love this {}, it is great.",
    "What a wonderful {}!",
    "The {} was excellent.",
    "This is the best {} I ever had.",
)
_BAD = ("This {} is very bad.", "I hate this {}.", "The {} was terrible.", "What an awful {}, it broke at once.")
_PLAIN = ("The {} is on the table.", "I have a {}.", "The {} costs ten dollars.")


def _label(rng: Random) -> Exchange:
    label, forms = rng.choice((("positive", _GOOD), ("negative", _BAD), ("neutral", _PLAIN)))
    text = rng.choice(forms).format(rng.choice(THINGS + FOODS))
    if rng.random() < 0.3:
        question = f'Is this text positive, negative or neutral? "{text}"'
        return Exchange(question, f"The text is {label}.", f"The words sound {label}.")
    question = rng.choice(
        ('Classify the text and answer as JSON: "{}"', 'Give the sentiment of this text as JSON: "{}"')
    )
    return Exchange(question.format(text), json.dumps({"text": text, "label": label}), f"The words sound {label}.")


def json_task(rng: Random) -> Exchange:
    return rng.choice(
        (_person, _person, _free_object, _free_object, _about, _schema, _schema, _list_and_numbers, _label)
    )(rng)
