"""Hand-written small talk, knowledge, jokes, opposites and translations, all written for this project."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def _lines(name: str) -> list[str]:
    lines = (_FOLDER / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _variants(line: str) -> tuple[str, ...]:
    return tuple(part.strip().replace("\\n", "\n") for part in line[1:].split("|"))


def _intents() -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """(what users type, answers, what the thinking says) of each intent; greetings and identity come first."""
    lines = _lines("small_talk.txt")
    groups = zip(lines[::3], lines[1::3], lines[2::3], strict=True)
    return [(_variants(asked), _variants(answers), _variants(thought)[0]) for asked, answers, thought in groups]


INTENTS = _intents()
KNOWLEDGE: list[tuple[str, ...]] = [
    _variants(" " + line) for line in _lines("knowledge.txt")
]  # question, answer, topic
JOKES = (
    "Why did the chicken cross the road? To get to the other side!",
    "Why is six afraid of seven? Because seven eight nine.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why did the book go to the doctor? It had hurt its spine.",
    "What did one wall say to the other wall? I will meet you at the corner.",
    "Why can a bicycle not stand on its own? It is two tired.",
    "What has four wheels and flies? A garbage truck.",
    "Why was the math book sad? It had too many problems.",
    "What do you call cheese that is not yours? Nacho cheese.",
    "Why did the computer go to bed? It needed to crash.",
    "What do cows read in the morning? The moos paper.",
    "How do you make an egg roll? You push it.",
    "What is a cat's favorite color? Purr-ple.",
    "Why did the cookie cry? Because its mother was a wafer so long.",
    "What do you get when you cross a fish and an elephant? Swimming trunks.",
    "Why do bees have sticky hair? They use a honeycomb.",
    "What kind of tree fits in your hand? A palm tree.",
    "Why did the train stop and refuse to go on? The driver had lost its train of thought.",
)
JOKE_REQUESTS = (
    "Tell me a joke.",
    "Tell me a joke!",
    "Do you know a joke?",
    "Can you tell me a joke?",
    "Make me laugh.",
    "tell me a joke",
    "Tell me something funny.",
    "Another joke, please.",
    "I need a good joke.",
    "Say something funny.",
    "Give me a joke.",
)
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "good": "bad",
    "fast": "slow",
    "old": "young",
    "happy": "sad",
    "light": "dark",
    "open": "closed",
    "high": "low",
    "long": "short",
    "hard": "soft",
    "full": "empty",
    "early": "late",
    "rich": "poor",
    "strong": "weak",
    "clean": "dirty",
    "left": "right",
    "day": "night",
    "black": "white",
    "wet": "dry",
    "easy": "difficult",
    "loud": "quiet",
    "near": "far",
    "first": "last",
    "true": "false",
    "begin": "end",
    "push": "pull",
    "win": "lose",
}
TRANSLATIONS = {
    "French": {
        "hello": "bonjour",
        "thank you": "merci",
        "water": "eau",
        "house": "maison",
        "dog": "chien",
        "cat": "chat",
        "good": "bon",
        "yes": "oui",
        "no": "non",
        "goodbye": "au revoir",
        "bread": "pain",
        "friend": "ami",
    },
    "Spanish": {
        "hello": "hola",
        "thank you": "gracias",
        "water": "agua",
        "house": "casa",
        "dog": "perro",
        "cat": "gato",
        "good": "bueno",
        "yes": "sí",
        "no": "no",
        "goodbye": "adiós",
        "bread": "pan",
        "friend": "amigo",
    },
    "German": {
        "hello": "hallo",
        "thank you": "danke",
        "water": "Wasser",
        "house": "Haus",
        "dog": "Hund",
        "cat": "Katze",
        "good": "gut",
        "yes": "ja",
        "no": "nein",
        "goodbye": "auf Wiedersehen",
        "bread": "Brot",
        "friend": "Freund",
    },
    "Italian": {
        "hello": "ciao",
        "thank you": "grazie",
        "water": "acqua",
        "house": "casa",
        "dog": "cane",
        "cat": "gatto",
        "good": "buono",
        "yes": "sì",
        "no": "no",
        "goodbye": "arrivederci",
        "bread": "pane",
        "friend": "amico",
    },
}
