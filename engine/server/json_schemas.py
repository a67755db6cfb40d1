"""JSON schemas as clients send them, brought to the form that is compiled. Knows no grammars."""

from __future__ import annotations

from typing import Any

# What does not say what a value may be.
ANNOTATIONS = ("title", "description", "examples", "default", "$comment", "deprecated", "readOnly", "writeOnly")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
OF_VALUES = ("enum", "const")
COMBINED = ("allOf", "not")  # whose parts say nothing of the whole
# Beside one of these, an object may have properties that its own list does not name.
OPENERS = ("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


def bare(schema: Any) -> Any:
    """The schema without annotations, which a grammar has no use for and which may be most of its text."""
    if isinstance(schema, list):
        return [bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in OF_VALUES
        else {name: bare(item) for name, item in value.items()}
        if key in OF_NAMES and isinstance(value, dict)
        else bare(value)
        for key, value in schema.items()
        if key not in ANNOTATIONS
    }


def closed(schema: Any) -> Any:
    """The schema where every object that lists its properties has no others, as OpenAI's strict mode wants it written.

    A strict schema that leaves that open would let a model make up names until its budget ends. What says itself
    whether there may be others, and what is combined with other schemas, stays as it is.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed_value(key, value) for key, value in schema.items()}
    is_list = isinstance(schema.get("properties"), dict)
    return found | ({"additionalProperties": False} if is_list and not any(key in schema for key in OPENERS) else {})


def _closed_value(key: str, value: Any) -> Any:
    if key in OF_VALUES or key in COMBINED:
        return value
    if key in OF_NAMES and isinstance(value, dict):
        return {name: closed(item) for name, item in value.items()}
    return closed(value)
