"""How much one request may hold, so that reading, rendering and compiling it take bounded time.

The size of the body, its nesting, `n`, stop strings and choices have limits where they are read.
"""

from __future__ import annotations

from typing import Any

from engine.server.errors import ApiError, bad_request
from engine.server.transport import dumps

MAX_MESSAGES = 16_384
MAX_PARTS = 4_096  # content parts, or tool calls, of one message
MAX_TOOLS = 1_024
MAX_BIASES = 16_384  # entries of logit_bias
MAX_SCHEMA_BYTES = 4 * 2**20  # of everything that is compiled or rendered as a schema, as JSON
SCHEMA_FIELDS = (
    *("tools", "functions", "response_format", "structured_outputs", "structural_tag", "json_schema", "regex"),
    *("grammar", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


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
