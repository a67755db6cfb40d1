import pytest

from engine.server.json_schemas import bare, closed

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = NAMED | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (NAMED | {"additionalProperties": True}, NAMED | {"additionalProperties": True}),
        (NAMED | {"patternProperties": {"^x": NAMED}}, NAMED | {"patternProperties": {"^x": CLOSED}}),
        ({"allOf": [NAMED, NAMED]}, {"allOf": [NAMED, NAMED]}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": CLOSED}),
        ({"$ref": "#/$defs/n", "$defs": {"n": NAMED}}, {"$ref": "#/$defs/n", "$defs": {"n": CLOSED}}),
        ({"properties": {"properties": NAMED}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
        ({"enum": [NAMED], "const": NAMED}, {"enum": [NAMED], "const": NAMED}),
        (True, True),
    ],
)  # fmt: skip
def test_strict_objects_have_the_properties_that_they_list(schema, expected):
    assert closed(schema) == expected


def test_annotations_go_and_properties_of_their_names_stay():
    schema = {"title": "T", "properties": {"title": {"type": "string", "description": "D"}}, "enum": [{"title": 1}]}
    assert bare(schema) == {"properties": {"title": {"type": "string"}}, "enum": [{"title": 1}]}
