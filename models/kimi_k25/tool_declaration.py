"""Tool declarations as Kimi-K2.5 was trained to read them: a TypeScript namespace written from JSON Schema.

Knows nothing of templates or tokens. What this form cannot express is declined, and the caller shows JSON instead.
"""

from __future__ import annotations

import json
from typing import Any

INDENT = "  "
# Far above any real schema, far below the interpreter's stack: a level costs at most three frames.
MAX_DEPTH = 100
DEFS = "#/$defs/"
SCALARS = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null"}
UNION_MEMBERS = SCALARS | {"object": "{}", "array": "Array<any>"}
CONSTRAINTS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
PYTHON_TYPES = {"string": str, "number": int | float, "integer": int, "boolean": bool}


class UnsupportedSchemaError(ValueError):
    """A schema that has no TypeScript form here."""


def declare_tools(tools: list[dict]) -> str | None:
    """The declaration of all `tools` (OpenAI's form), keys sorted at every level; "" if none is a function.

    Returns None when any schema has no TypeScript form (oneOf or allOf alone, foreign $ref, more than MAX_DEPTH levels
    of nesting, values of the wrong type): the whole list is then declared as JSON, as the checkpoint's tokenizer does.
    """
    if _deeper_than(tools, MAX_DEPTH):
        return None
    try:
        ordered = json.loads(json.dumps(tools, sort_keys=True))
        blocks = [_tool_block(t["function"]) for t in ordered if t.get("type") == "function" and t.get("function")]
    except (UnsupportedSchemaError, TypeError, KeyError, AttributeError, ValueError):
        return None
    if not blocks:
        return ""
    return "\n".join(["# Tools", "", "## functions", "namespace functions {", *blocks, "}", ""])


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [child for node in level for child in _children(node)]
        if not level:
            return False
    return True


def _children(node: Any) -> list[Any]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return [child for child in children if isinstance(child, dict | list | tuple)]


def _tool_block(function: dict) -> str:
    """Interfaces of referenced definitions, the description as a comment, then the type of the function."""
    parameters = function.get("parameters") or {}
    writer = _Writer()
    signature, lines = writer.object_type(parameters, ""), []
    # A definition that refers to the root comes too late to be seen here, in the checkpoint's encoder too.
    if writer.refers_to_root:
        signature, lines = "parameters", [writer.root_interface(parameters)]
    lines += writer.definition_interfaces()
    if function.get("description"):
        lines.append(_comment(function["description"], ""))
    lines.append(f"type {function.get('name', 'function')} = (_: {signature}) => any;")
    return "\n".join(lines)


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


class _Writer:
    """Writes the types of one tool and remembers the definitions that it meets."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def root_interface(self, parameters: dict) -> str:
        """All fields by name, required or not, and nothing on further keys: the form that a self reference has."""
        fields = ",\n".join(self._fields(parameters, INDENT).values())
        return "interface parameters {" + (f"\n{fields}\n" if fields else "") + "}"

    def definition_interfaces(self) -> list[str]:
        blocks = []
        for name, schema in list(self.definitions.items()):
            if schema.get("description"):
                blocks.append(_comment(schema["description"], ""))
            blocks.append(f"interface {name} {self.type_of(schema, '')}")
        return blocks

    def type_of(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, dict):
            raise UnsupportedSchemaError(f"A schema must be an object or a boolean, not {schema!r}.")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type_of(option, indent) for option in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        if "type" in schema:
            return self._typed(schema, indent)
        if schema:
            raise UnsupportedSchemaError(f"No TypeScript form for a schema with only {sorted(schema)}.")
        return "any"

    def _reference(self, ref: str) -> str:
        if ref == "#":
            self.refers_to_root = True
            return "parameters"
        name = ref.rsplit("/", 1)[-1]
        if not ref.startswith(DEFS) or name not in self.definitions:
            raise UnsupportedSchemaError(f"Reference {ref!r} does not name a definition under {DEFS}.")
        return name

    def _typed(self, schema: dict, indent: str) -> str:
        kind = schema["type"]
        if isinstance(kind, list):
            return " | ".join(UNION_MEMBERS[member] for member in kind)
        if kind == "object":
            return self.object_type(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if not isinstance(kind, str):
            raise UnsupportedSchemaError(f"A type must be a name or a list of names, not {kind!r}.")
        return SCALARS.get(kind, kind)

    def _array(self, schema: dict, indent: str) -> str:
        item = schema.get("items")
        if not item:
            return "Array<any>"
        inner = indent + INDENT
        comments = _comments(item, inner)
        if not comments:
            return f"Array<{self.type_of(item, indent)}>"
        return "\n".join(["Array<", *comments, inner + self.type_of(item, inner), f"{indent}>"])

    def object_type(self, schema: dict, indent: str) -> str:
        self.definitions.update(schema.get("$defs") or {})
        inner = indent + INDENT
        extra = schema.get("additionalProperties")
        extra_type = "never" if extra is False else None if extra is None else self.type_of(extra, inner)
        fields = self._fields(schema, inner)
        required = set(schema.get("required", [])) if fields else set()
        lines = [fields[name] for name in sorted(fields, key=lambda name: (name not in required, name))]
        if extra_type is not None:
            lines.append(f"{inner}[k: string]: {extra_type}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

    def _fields(self, schema: dict, indent: str) -> dict[str, str]:
        properties = schema.get("properties", {})
        required = set(schema.get("required", [])) if properties else set()
        return {name: self._field(name, field, name in required, indent) for name, field in properties.items()}

    def _field(self, name: str, schema: Any, required: bool, indent: str) -> str:
        lines = _comments(schema, indent)
        default = schema.get("default") if isinstance(schema, dict) else None
        if default is not None:
            plain = isinstance(default, int | float)
            lines.append(f"{indent}// Default: {default if plain else json.dumps(default, ensure_ascii=False)}")
        lines.append(f"{indent}{name}{'' if required else '?'}: {self.type_of(schema, indent)}")
        return "\n".join(lines)


def _comments(schema: Any, indent: str) -> list[str]:
    """Description lines, then the constraints on one line."""
    if not isinstance(schema, dict):
        return []
    lines = [_comment(schema["description"], indent)] if schema.get("description") else []
    kind = schema.get("type")
    known = CONSTRAINTS.get(kind, ()) if isinstance(kind, str) and _is_plainly_typed(schema) else ()
    found = [f"{key}: {schema[key]}" for key in known if key in schema]
    if found:
        lines.append(f"{indent}// {', '.join(found)}")
    return lines


def _is_plainly_typed(schema: dict) -> bool:
    return not any(key in schema for key in ("$ref", "anyOf", "enum"))


def _enum(schema: dict) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        if len(kind) > 2 or (len(kind) == 2 and "null" not in kind):
            raise UnsupportedSchemaError(f"An enum of the types {kind} has no TypeScript form.")
        kind = next((member for member in kind if member != "null"), "null")
    allowed = PYTHON_TYPES.get(kind)
    for value in schema["enum"]:
        if allowed and value is not None and not isinstance(value, allowed):
            raise UnsupportedSchemaError(f"Enum value {value!r} is not of type {kind}.")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
