"""What must an answer be? Every spelling of that wish in use, brought to one constraint or refused.

Each constraint remembers the field that the client used, for error messages. A request has one: of two the server
would have to guess which counts. Only "any JSON object" gives way, to a JSON schema, which says the same and more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from engine.grammar.bounds import MAX_TEXT
from engine.server.errors import bad_request
from engine.server.json_schemas import closed
from engine.server.protocol import FORMATS, SamplingFields

SCHEMA_KEYS = ("name", "description", "schema", "strict")
VLLM_KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class Constraint:
    """value: of "json" the schema, of "json_object" True, of "choice" a list of texts, else the client's text.

    is_lenient: keywords of the schema that cannot be enforced may be passed over, with a warning.
    """

    field: str
    kind: Literal["json", "json_object", "regex", "choice", "grammar"]
    value: Any
    is_lenient: bool = False


def asked_constraint(body: SamplingFields) -> Constraint | None:
    """The one constraint of a request. Raises 400 naming the field for a malformed one or a second one."""
    found = [constraint for field, read in READERS.items() for constraint in read(field, getattr(body, field))]
    if any(constraint.kind == "json" for constraint in found):
        found = [constraint for constraint in found if constraint.kind != "json_object"]
    if len(found) > 1:
        first, second = found[0].field, found[1].field
        raise bad_request(f"{second} and {first} both say what the answer must be; give one of them.", second)
    return found[0] if found else None


def unknown_keys(body: SamplingFields) -> list[str]:
    """The keys within `structured_outputs` and `response_format` that nobody reads."""
    given = body.structured_outputs or {}
    unknown = [f"structured_outputs.{key}" for key in given if key not in (*VLLM_KINDS, "structural_tag")]
    return unknown + [f"response_format.{key}" for key in _unknown_in_format(body.response_format or {})]


def _unknown_in_format(wish: dict[str, Any]) -> list[str]:
    if wish.get("type") not in ("json_object", "json_schema"):
        return [key for key in _given(wish) if key != "type"]
    place, inner = _schema_place(wish)
    if not place:
        return [key for key in _given(wish) if key not in ("type", *SCHEMA_KEYS)]
    unknown = [key for key in _given(wish) if key not in ("type", "json_schema")]
    inner = inner if isinstance(inner, dict) else {}
    return unknown + [f"json_schema.{key}" for key in _given(inner) if key not in SCHEMA_KEYS]


def _given(value: dict[str, Any]) -> list[str]:
    return [key for key, item in value.items() if item is not None]


def _schema_place(wish: dict[str, Any]) -> tuple[str, Any]:
    """(path within response_format, object that holds the schema): in its place of OpenAI's form, or beside the type
    as other servers take it."""
    if wish.get("json_schema") is None and wish.get("schema") is not None:
        return "", wish
    return ".json_schema", wish.get("json_schema")


def _response_format(field: str, value: dict[str, Any] | None) -> Iterator[Constraint]:
    if value is None or value.get("type") == "text":
        return
    kind = value.get("type")
    if kind not in FORMATS:
        raise bad_request(f"{field}.type must be one of {', '.join(FORMATS)}.", f"{field}.type")
    place, inner = _schema_place(value)
    place = field + place
    if kind == "json_object" and inner is None:
        yield Constraint(field, "json_object", True)
        return
    if not isinstance(inner, dict):
        raise bad_request(f"{place} must be an object with a name and a schema.", place)
    strict = inner.get("strict")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{place}.strict must be true or false.", f"{place}.strict")
    if inner.get("schema") is None:
        raise bad_request(f"{place}.schema is required.", f"{place}.schema")
    schema = _schema(f"{place}.schema", inner["schema"])
    yield Constraint(f"{place}.schema", "json", closed(schema) if strict else schema, not strict)


def _structured_outputs(field: str, value: dict[str, Any] | None) -> Iterator[Constraint]:
    """vLLM's object of one kind."""
    given = {key: item for key, item in (value or {}).items() if item is not None and item is not False}
    if "structural_tag" in given:
        raise bad_request(f"{field}.structural_tag is not supported; leave it out.", f"{field}.structural_tag")
    kinds = [key for key in VLLM_KINDS if key in given]
    if len(kinds) > 1:
        raise bad_request(f"{field} has {' and '.join(kinds)}; give one of them.", field)
    for key in kinds:
        place = f"{field}.{key}"
        if key == "json_object":
            if given[key] is not True:
                raise bad_request(f"{place} must be true or false.", place)
            yield Constraint(place, "json_object", True)
        else:
            yield from BY_KIND[key](place, given[key])


def _json(field: str, value: Any) -> Iterator[Constraint]:
    if value not in (None, ""):
        yield Constraint(field, "json", _schema(field, value))


def _regex(field: str, value: Any) -> Iterator[Constraint]:
    if value not in (None, ""):
        yield Constraint(field, "regex", _text(field, value))


def _grammar(field: str, value: Any) -> Iterator[Constraint]:
    if value not in (None, ""):
        yield Constraint(field, "grammar", _text(field, value))


def _choice(field: str, value: Any) -> Iterator[Constraint]:
    if value in (None, []):
        return
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise bad_request(f"{field} must be a list of strings.", field)
    if "" in value:
        raise bad_request(f"{field} holds an empty string; an answer needs at least one character.", field)
    yield Constraint(field, "choice", value)


def _schema(field: str, value: Any) -> dict[str, Any] | bool:
    """A schema, also one sent as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(_text(field, value))
            json.dumps(value)  # as it will be written for the engine, from no deeper in the stack
        except (ValueError, RecursionError) as error:
            problem = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
            raise bad_request(f"{field} {problem}; send the schema as an object.", field) from None
    if not isinstance(value, dict | bool):
        raise bad_request(f"{field} must be a JSON schema: an object.", field)
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{field} must be a string.", field)
    if len(value) > MAX_TEXT:
        raise bad_request(f"{field} has {len(value)} characters; at most {MAX_TEXT} are taken.", field)
    return value


Reader = Callable[[str, Any], Iterator[Constraint]]
BY_KIND: dict[str, Reader] = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
# OpenAI's field, vLLM's, vLLM's former ones, SGLang's, llama.cpp's.
READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "regex": _regex,
    "ebnf": _grammar,
    "json_schema": _json,
    "grammar": _grammar,
}
