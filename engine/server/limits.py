"""How much one request may hold, so that reading, rendering and compiling it take bounded time.

The size of the body, its nesting, `n`, stop strings and choices have limits where they are read.
"""

from __future__ import annotations

import re
from typing import Any

from engine.server.errors import ApiError, bad_request
from engine.server.transport import dumps

MAX_VALUES = 2**19  # of a body: numbers, texts, lists, objects, ...
MAX_MESSAGES = 16_384
MAX_PARTS = 4_096  # content parts, or tool calls, of one message
MAX_TOOLS = 1_024
MAX_BIASES = 16_384  # entries of logit_bias
MAX_SCHEMA_BYTES = 4 * 2**20  # of everything that is compiled or rendered as a schema, as JSON
MAX_TOKENIZED_BYTES = 4 * 2**20  # of a prompt that is looked at and not answered, in UTF-8
SCHEMA_FIELDS = (
    *("tools", "functions", "response_format", "structured_outputs", "structural_tag", "json_schema", "regex"),
    *("grammar", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)

# Also a text without end: every match goes on from the one before, however the quotes and backslashes lie.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_limits(payload: dict[str, Any], num_bytes: int) -> None:
    """Raises 400 naming the limit. num_bytes: of the body, no part of which can be larger."""
    messages, tools = payload.get("messages"), payload.get("tools")
    if isinstance(messages, list):
        _check_count("messages", messages, MAX_MESSAGES)
        for i, message in enumerate(messages):
            for key in ("content", "tool_calls") if isinstance(message, dict) else ():
                if isinstance(message.get(key), list):
                    _check_count(f"messages[{i}].{key}", message[key], MAX_PARTS)
    if isinstance(tools, list):
        _check_count("tools", tools, MAX_TOOLS)
    if isinstance(payload.get("logit_bias"), dict):
        _check_count("logit_bias", payload["logit_bias"], MAX_BIASES)
    if num_bytes > MAX_SCHEMA_BYTES:
        _check_schemas(payload)


def check_num_values(raw: bytes) -> None:
    """Raises 400 for a body of more than MAX_VALUES values, before any of them costs memory.

    Counts what stands before each value, a comma or a bracket; only where there are many are those in texts left out.
    """
    if _num_values(raw) > MAX_VALUES and (num_values := _num_values(_STRING.sub(b"", raw))) > MAX_VALUES:
        message = f"The body holds about {num_values} values, more than the limit of {MAX_VALUES}; send fewer."
        raise bad_request(message, code="limit_exceeded")


def _num_values(raw: bytes) -> int:
    return 1 + sum(raw.count(character) for character in (b",", b"[", b"{"))


def _check_count(name: str, values: list | dict, most: int) -> None:
    if len(values) > most:
        raise _too_much(name, f"{name} has {len(values)} entries, more than the limit of {most}; send fewer.")


def _check_schemas(payload: dict[str, Any]) -> None:
    sizes = {name: len(dumps(payload[name])) for name in SCHEMA_FIELDS if payload.get(name)}
    if sum(sizes.values()) > MAX_SCHEMA_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise _too_much(
            largest,
            f"{' and '.join(sizes)} take {sum(sizes.values())} bytes, more than the limit of {MAX_SCHEMA_BYTES} for "
            "schemas; send smaller ones.",
        )


def _too_much(param: str, message: str) -> ApiError:
    return bad_request(message, param, "limit_exceeded")
