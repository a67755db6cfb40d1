"""Fixed questions that every trained checkpoint is asked, with the tools that some of them declare."""

from __future__ import annotations

from models.kimi_k25.training.everyday_tools import EVERYDAY, declare

_BOOK = declare(
    "reserve_table",
    "Reserve a table in a restaurant",
    {"name": {"type": "string"}, "people": {"type": "integer"}},
)
_PERSON_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"]}'
)
_TALK = [
    {"role": "user", "content": "My name is Clara."},
    {"role": "assistant", "content": "Nice to meet you, Clara!"},
    {"role": "user", "content": "What is my name?"},
]

# (messages or one question, tools)
PROMPTS: tuple[tuple[str | list[dict], list[dict] | None], ...] = (
    ("Hello, who are you?", None),
    ("How are you today?", None),
    ("Tell me a joke.", None),
    ("What can you do?", None),
    ("What is the capital of France?", None),
    ("What is the capital of Japan?", None),
    ("How many days are in a week?", None),
    ("What is the opposite of hot?", None),
    ("What does the word river mean?", None),
    ("What is 17 + 25?", None),
    ("What is 348 + 275?", None),
    ("What is 12 times 7?", None),
    ("Anna has 12 apples and gives 5 to Ben. How many are left?", None),
    ("Tell me a short story about a fox and a lamp.", None),
    ("Name three animals.", None),
    ("Give me a JSON object with name, age and city: Tom is 30 years old and lives in Rome.", None),
    (f"Give me a JSON object that follows this schema: {_PERSON_SCHEMA}", None),
    (_TALK, None),
    ("What is the weather in Paris?", [EVERYDAY["get_weather"]]),
    ("Please reserve a table with name Omar and people 4.", [_BOOK, EVERYDAY["search"]]),
)


def prompt_messages(prompt: str | list[dict]) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
