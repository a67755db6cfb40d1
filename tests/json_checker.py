"""Checks a value against the few keywords of JSON Schema that the tests' own schemas use."""

from __future__ import annotations

from typing import Any

TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int}


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Keywords: type, enum, anyOf, properties, required, additionalProperties (false), items, minItems, maxItems,
    maxLength, minimum, maximum."""
    if "anyOf" in schema:
        return any(matches(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    if kind is dict:
        fields = schema.get("properties", {})
        known = all(name in fields and matches(value[name], fields[name]) for name in value)
        return known and all(name in value for name in schema.get("required", ()))
    if kind is list:
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(matches(one, schema["items"]) for one in value)
    if kind is str:
        return len(value) <= schema.get("maxLength", len(value))
    return kind is not int or schema.get("minimum", value) <= value <= schema.get("maximum", value)
