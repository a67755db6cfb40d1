"""Every spelling of structured output, up to what the engine is handed."""

import asyncio
import json
import threading

import pytest

from engine.server.binding import bind_completion
from engine.server.grammar_desk import GrammarDesk
from engine.server.protocol import CompletionRequest
from tests.engine.server.grammars import takes
from tests.engine.server.harness import HI, tokenizer

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ONE_OF = {"oneOf": [{"type": "integer"}, {"type": "boolean"}]}
NOT = {"type": "object", "properties": {"a": {"not": {}}}}


def bound(server, path, fields):
    """(what the engine is handed, the answer) of a request with `fields`."""
    answer = server.chat(**fields) if path == CHAT else server.complete(**fields)
    return server.core.requests[-1][2].structured_outputs, answer


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    "fields, good, bad",
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}}},
         '{"city": "Oslo"}', '{"city": 5}'),
        ({"response_format": {"type": "json_schema", "schema": CITY}}, '{"city": "Oslo"}', "{}"),
        ({"response_format": {"type": "json_object", "schema": CITY}}, '{"city": "Oslo"}', "{}"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": CITY}}}, '{"city": "Oslo"}', "{}"),
        ({"response_format": {"type": "json_object", "json_schema": None}}, "{}", "5"),
        ({"structured_outputs": {"json": CITY}}, '{"city": "Oslo"}', "{}"),
        ({"structured_outputs": {"json": json.dumps(CITY), "regex": None}}, '{"city": "Oslo"}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "5"),
        ({"structured_outputs": {"regex": "a/b|c+"}}, "a/b", "ab"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "ye"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "x" | "y"'}}, "ay", "a"),
        ({"guided_json": CITY}, '{"city": "Oslo"}', "{}"),
        ({"guided_json": ONE_OF}, "true", '"x"'),
        ({"guided_regex": "[0-9]{3}"}, "123", "12"),
        ({"guided_choice": ['a"b', "é\n"]}, "é\n", "é"),
        ({"guided_grammar": 'root ::= "a" [0-9]+'}, "a12", "a"),
        ({"regex": "x{2}"}, "xx", "x"),
        ({"ebnf": 'root ::= item ("," item)*\nitem ::= "p" | "q"'}, "p,q", "p,"),
        ({"json_schema": json.dumps(CITY)}, '{"city": ""}', "5"),
        ({"grammar": 'root ::= "yes" | "no"'}, "no", "maybe"),
        ({"response_format": {"type": "text"}, "regex": None, "guided_choice": [], "structured_outputs": {},
          "ebnf": ""}, None, None),
    ],
)  # fmt: skip
def test_every_spelling(server, path, fields, good, bad):
    outputs, answer = bound(server, path, fields | {"thinking": {"type": "disabled"}} if path == CHAT else fields)
    assert "warnings" not in answer
    if good is None:
        assert outputs is None
    else:
        assert takes(outputs, good) and not takes(outputs, bad) and not (outputs.begins_after or outputs.begins_at)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "["}}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": CITY, "strict": "yes"}}},
         "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": NOT, "strict": True}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
        ({"response_format": {"type": "grammar", "grammar": "x"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": CITY, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structural_tag": {"x": 1}}, "structural_tag"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": [str(i) for i in range(10_001)]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": False}, "guided_json"),
        ({"guided_json": {"$ref": "#/$defs/missing"}}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/schema"}}, "guided_json"),
        ({"guided_json": NOT}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 2**18]}}, "guided_json"),
        ({"regex": "("}, "regex"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"guided_regex": "a" * (2**18 + 1)}, "guided_regex"),
        ({"ebnf": "junk"}, "ebnf"),
        ({"ebnf": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "ebnf"),
        ({"ebnf": "a ::= \"b\""}, "ebnf"),
        ({"ebnf": "root ::= b"}, "ebnf"),
        ({"ebnf": "\n" * 2**18}, "ebnf"),
        ({"ebnf": "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(10_000)) + "r10000 ::= [a]"}, "ebnf"),
        ({"ebnf": "root ::= [a]{" + "9" * 5000 + "}"}, "ebnf"),
        ({"guided_json": '{"items":' * 900 + "{}" + "}" * 900}, "guided_json"),
        ({"guided_json": {"properties": {str(i): {} for i in range(1001)}}}, "guided_json"),
        ({"grammar": "start: ((("}, "grammar"),
        ({"guided_grammar": 'start: "a" missing'}, "guided_grammar"),
        ({"guided_json": CITY, "regex": "a"}, "regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
    ],
)  # fmt: skip
def test_b061_what_cannot_be_compiled_names_its_field(server, fields, param):
    for path, body in ((CHAT, {"messages": HI}), (COMPLETION, {"prompt": "a"})):
        error = server.refusal(path, body | fields)
        assert error["param"] == param and "\n" not in error["message"] and len(error["message"]) < 500
    assert not server.core.requests and server.chat()["choices"]


@pytest.mark.parametrize("weak", [{"response_format": {"type": "json_object"}},
                                  {"structured_outputs": {"json_object": True}}])  # fmt: skip
@pytest.mark.parametrize("strong", [{"guided_json": CITY}, {"json_schema": CITY}])
def test_b066_a_schema_counts_more_than_any_object(server, weak, strong):
    both, _ = bound(server, CHAT, weak | strong)
    alone, _ = bound(server, CHAT, weak)
    assert takes(both, '{"city": "Oslo"}') and not takes(both, "{}")
    assert takes(alone, "{}") and not takes(alone, "5")


SCHEMA = {"name": "c", "description": "d", "schema": CITY, "strict": None}


@pytest.mark.parametrize(
    "wish, unknown",
    [
        ({"type": "json_schema", "json_schema": SCHEMA}, []),
        ({"type": "json_schema", "schema": CITY, "name": "c", "strict": True}, []),
        ({"type": "json_object", "regex": "a", "strict": None}, ["regex"]),
        ({"type": "text", "json_schema": SCHEMA}, ["json_schema"]),
        ({"type": "json_object", "json_schema": SCHEMA | {"examples": [1]}, "schema": CITY},
         ["schema", "json_schema.examples"]),
    ],
)  # fmt: skip
def test_b066_what_has_no_effect_in_a_response_format_is_reported(server, wish, unknown):
    for answer in (server.chat(response_format=wish), server.complete(response_format=wish)):
        warnings = answer.get("warnings", [])
        assert [warning.split()[0] for warning in warnings] == [f"response_format.{key}" for key in unknown]


def test_b058_the_answer_is_bound_after_the_reasoning(server):
    wish, end = {"response_format": {"type": "json_object"}}, (tokenizer().think_end_id,)
    thinking, _ = bound(server, CHAT, wish)
    silent, _ = bound(server, CHAT, wish | {"chat_template_kwargs": {"thinking": False}})
    assert (thinking.begins_after, thinking.begins_at) == (end, ())
    assert (silent.begins_after, silent.begins_at) == ((), ())
    for text, expected in (("<think>", 2), ("Hi", 1)):
        completion, _ = bound(server, COMPLETION, wish | {"prompt": text, "n": expected})
        assert completion.begins_after == () and server.core.requests[-1][2].n == expected


def test_b064_recursive_and_nested_references(server):
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["v"], "additionalProperties": False}  # fmt: skip
    schema = {"$defs": {"Node": node}, "type": "array", "items": {"$ref": "#/$defs/Node"}}
    outputs, _ = bound(server, CHAT, {"guided_json": schema})
    assert takes(outputs, '[{"v": 1, "next": {"v": 2, "next": {"v": 3}}}]') and not takes(outputs, '[{"next": {}}]')


def test_what_is_not_enforced_is_told(server):
    loose = {"type": "json_schema", "json_schema": {"name": "x", "schema": NOT}}
    outputs, answer = bound(server, CHAT, {"response_format": loose, "structured_outputs": {"backend": "x"}})
    assert takes(outputs, '{"a": 1}') and not takes(outputs, "5")
    first, second = answer["warnings"]
    assert "structured_outputs.backend" in first
    assert second.startswith("response_format.json_schema.schema is enforced in part") and "not" in second


def test_grammars_are_compiled_beside_the_event_loop():
    threads = []
    body = CompletionRequest(prompt="a", guided_json=CITY)
    asyncio.run(bind_completion(body, GrammarDesk(lambda outputs: threads.append(threading.get_ident()))))
    assert len(threads) == 1 and threads[0] != threading.get_ident()
