"""Tool declarations as TypeScript: the reference text, every kind of schema, and what falls back to JSON."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.kimi_k25.tool_declaration import MAX_DEPTH, declare_tools
from tests.chats import json_values

WEATHER = {
    "name": "get_weather",
    "description": "Look up weather.\nOne city at a time.",
    "parameters": {
        "type": "object",
        "required": ["city"],
        "properties": {
            "unit": {"type": "string", "enum": ["c", "f"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "opt": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False},
            "days": {"type": "integer", "minimum": 1, "maximum": 7, "default": 1},
            "city": {"type": "string", "description": "City name"},
        },
    },
}
EXAMPLE_F = """# Tools

## functions
namespace functions {
// Look up weather.
// One city at a time.
type get_weather = (_: {
  // City name
  city: string,
  // maximum: 7, minimum: 1
  // Default: 1
  days?: number,
  opt?: {
    x?: number,
    [k: string]: never
  },
  tags?: Array<string>,
  unit?: "c" | "f"
}) => any;
type ping = (_: {}) => any;
}
"""


def tool(parameters: dict | None = None, **function: object) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}


def declared(parameters: dict, **function: object) -> str | None:
    """The block of one tool without the frame around it."""
    text = declare_tools([tool(parameters, **function)])
    if text is None:
        return None
    head, foot = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head) and text.endswith(foot)
    return text[len(head) : -len(foot)]


def field(schema: object) -> str | None:
    block = declared({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    return block and block.removeprefix("type f = (_: {\n").removesuffix("\n}) => any;")


def test_example_f():
    assert declare_tools([{"type": "function", "function": WEATHER}, tool(name="ping")]) == EXAMPLE_F


def test_only_functions_are_declared():
    assert declare_tools([]) == ""
    assert declare_tools([{"type": "_plugin", "name": "x"}, {"type": "function", "function": {}}]) == ""
    assert declare_tools([{"type": "_plugin"}, tool({})]) == declare_tools([tool({})])


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "  a: number"),
        ({"type": "null"}, "  a: null"),
        ({}, "  a: any"),
        (True, "  a: any"),
        (False, "  a: null"),
        ({"type": "date"}, "  a: date"),
        ({"type": ["integer", "object", "array", "null"]}, "  a: number | {} | Array<any> | null"),
        ({"anyOf": [{"type": "string"}, {"enum": [1, None, True, "x"]}]}, '  a: string | 1 | None | True | "x"'),
        ({"enum": ["x", None], "type": ["null", "string"]}, '  a: "x" | None'),
        ({"type": "array"}, "  a: Array<any>"),
        (
            {"type": "array", "items": True, "minItems": 1, "maxItems": 2},
            "  // maxItems: 2, minItems: 1\n  a: Array<any>",
        ),
        (
            {
                "type": "array",
                "items": {"type": "array", "items": {"type": "string", "minLength": 1}, "description": "d"},
            },
            "  a: Array<\n    // d\n    Array<\n      // minLength: 1\n      string\n    >\n  >",
        ),
        ({"type": "object"}, "  a: {}"),
        ({"type": "object", "additionalProperties": True}, "  a: {\n    [k: string]: any\n  }"),
        (
            {"type": "object", "additionalProperties": {"type": "object", "properties": {"b": {"type": "null"}}}},
            "  a: {\n    [k: string]: {\n      b?: null\n    }\n  }",
        ),
        (
            {"type": "string", "pattern": "^a$", "maxLength": 3, "minLength": 1, "maximum": 9, "description": "x\n\ny"},
            "  // x\n\n  // y\n  // maxLength: 3, minLength: 1, pattern: ^a$\n  a: string",
        ),
        ({"type": "boolean", "default": False}, "  // Default: False\n  a: boolean"),
        ({"type": "number", "default": 1.5}, "  // Default: 1.5\n  a: number"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n  a: string'),
        ({"type": "object", "default": {"b": [True], "a": None}}, '  // Default: {"a": null, "b": [true]}\n  a: {}'),
        ({"type": "string", "default": None}, "  a: string"),
    ],
)
def test_types_and_comments(schema, text):
    assert field(schema) == text


def test_required_fields_come_first_then_names_decide():
    properties = {name: {"type": "null"} for name in "zbya"}
    block = declared({"type": "object", "properties": properties, "required": ["z", "y", "missing"]})
    assert block == "type f = (_: {\n  y: null,\n  z: null,\n  a?: null,\n  b?: null\n}) => any;"


def test_references_become_interfaces():
    defs = {
        "Node": {"description": "A node.", "type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
        "Kind": {"enum": ["x"]},
    }
    properties = {"node": {"$ref": "#/$defs/Node", "description": "start"}, "kind": {"$ref": "#/$defs/Kind"}}
    assert declared({"type": "object", "$defs": defs, "properties": properties}, description="Walk.") == (
        'interface Kind "x"\n// A node.\ninterface Node {\n  next?: Node\n}\n// Walk.\n'
        "type f = (_: {\n  kind?: Kind,\n  // start\n  node?: Node\n}) => any;"
    )


def test_a_reference_to_the_root_names_the_parameters():
    properties = {"b": {"type": "string"}, "a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
    schema = {"type": "object", "properties": properties, "required": ["b"], "additionalProperties": False}
    assert declared(schema) == (
        "interface parameters {\n  a?: parameters | null,\n  b: string\n}\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}]},
        {"allOf": [{"type": "string"}]},
        {"description": "no type"},
        {"$ref": "#/$defs/Missing"},
        {"$ref": "#/definitions/X"},
        {"$ref": "other.json"},
        {"$ref": 3},
        {"type": ["text"]},
        {"type": {"a": 1}},
        {"type": "string", "description": 5},
        {"enum": 5},
        {"enum": [1], "type": "string"},
        {"enum": ["x"], "type": ["string", "integer"]},
        {"anyOf": 1},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"b": None}},
        {"type": "object", "additionalProperties": "x"},
        "string",
        None,
    ],
)
def test_what_has_no_typescript_form_falls_back_for_the_whole_list(schema):
    assert field(schema) is None
    assert declare_tools([tool({}), tool({"type": "object", "properties": {"a": schema}})]) is None


def nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_nesting_is_bounded():
    inside = MAX_DEPTH - 7
    assert field(nested(inside)) == f"  a: {'Array<' * inside}string{'>' * inside}"
    assert field(nested(MAX_DEPTH)) is None
    assert field(nested(200_000)) is None


def test_the_callers_tools_are_left_alone():
    tools = [tool({"type": "object", "properties": {"z": {}, "a": {}}})]
    declare_tools(tools)
    assert list(tools[0]["function"]["parameters"]["properties"]) == ["z", "a"]


WORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "anyOf",
        "enum",
        "$ref",
        "#",
        "$defs",
        "required",
        "object",
        "array",
        "description",
        "x",
    ]
)


@settings(max_examples=200, deadline=None)
@given(json_values(WORDS))
def test_any_json_is_declared_or_declined(value):
    for tools in (
        value,
        [value],
        [{"type": "function", "function": value}],
        [tool(value)],
        [tool({"properties": value})],
    ):
        text = declare_tools(tools)
        assert text is None or text == "" or text.startswith("# Tools\n\n## functions\nnamespace functions {\n")
