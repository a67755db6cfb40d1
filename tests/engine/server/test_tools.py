"""What requests say about tools: the four choices, strict functions, one call at a time, and what is refused."""

import time

import pytest

from engine.server.tool_grammar import BoundFunction, ToolMarkup, tool_grammar
from tests.engine.server.grammars import takes
from tests.engine.server.harness import HI, emit, tokenizer

CHAT = "/v1/chat/completions"
SB, SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CB, AB, CE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
OFF = {"thinking": {"type": "disabled"}}
X = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
NOT = {"type": "object", "properties": {"x": {"type": "integer"}}, "not": {"required": ["y"]}}


@pytest.fixture(autouse=True)
def roomy(server, monkeypatch):
    monkeypatch.setattr(server.client, "max_model_len", 100_000)


def tool(name, parameters=X, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def call(name, arguments='{"x": 1}', number=0):
    return f"{CB}functions.{name}:{number}{AB}{arguments}{CE}"


def section(*calls):
    return SB + "".join(calls) + SE


def bound(server, **fields):
    """(what the engine is handed, the answer)."""
    answer = server.chat(**fields)
    return server.core.requests[-1][2].structured_outputs, answer


FG = [tool("f"), tool("g")]
BOTH = section(call("f"), call("g", number=1))


@pytest.mark.parametrize(
    "fields, good, bad",
    [
        ({"tools": FG, "tool_choice": "required"}, (BOTH, section(call("g", number=12)), call("f")),
         ("", "text", section(), section(call("h")), section(call("f", "{}")), BOTH + "text", BOTH + BOTH)),
        ({"tools": FG, "tool_choice": named("g")}, (section(call("g")),), (section(call("f")), BOTH, "{}")),
        ({"tools": FG, "tool_choice": "required", "parallel_tool_calls": False}, (section(call("f")),), (BOTH,)),
        ({"tools": FG, "parallel_tool_calls": False}, (section(call("f", '{"y": 1}')), call("g", "{}")),
         (BOTH, call("f") + call("g"), section(call("f", "[]")))),
        ({"tools": [tool("f", strict=True), tool("g")]}, (section(call("f"), call("g", '{"y": 1}')),),
         (section(call("f", '{"y": 1}')), section(call("g", "5")))),
        ({"tools": FG, "tool_choice": allowed("required", "g")}, (section(call("g"), call("g")),), (BOTH, "text")),
        ({"tools": FG, "tool_choice": allowed("auto", "f")}, (section(call("f")),), (section(call("g")),)),
        ({"tools": FG, "response_format": {"type": "json_object"}}, ("{}", section(call("f", "{}"))), ("text", "5")),
        ({"tools": FG, "guided_choice": ["yes", 'n"o']}, ("yes", 'n"o', BOTH), ("no",)),
        ({"tools": FG, "regex": "a/[0-9]+"}, ("a/12", BOTH), ("a/", "{}")),
        ({"tools": FG, "tool_choice": "required", "regex": "a"}, (BOTH,), ("a",)),
        ({"tools": FG, "tool_choice": "none", "regex": "a"}, ("a",), (BOTH,)),
        ({"tools": [tool("f", None), tool("g", {})], "tool_choice": "required"},
         (section(call("f", "{}")), section(call("g", '{"y": []}'))), (section(call("f", '{"y": 1}')),)),
    ],
)  # fmt: skip
def test_what_an_answer_may_be(server, fields, good, bad):
    outputs, answer = bound(server, **fields, **OFF)
    assert "warnings" not in answer
    for text in good:
        assert takes(outputs, text), text
    for text in bad:
        assert not takes(outputs, text), text


@pytest.mark.parametrize(
    "fields",
    [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}, {"tool_choice": None},
     {"tool_choice": "none", "parallel_tool_calls": False}, {"tools": [tool("f", strict=False)]}],
)  # fmt: skip
def test_most_chats_with_tools_are_free(server, fields):
    outputs, _ = bound(server, **{"tools": FG} | fields)
    assert outputs is None


def test_where_an_answer_begins_to_be_bound(server):
    own = tokenizer()
    end, openers = (own.think_end_id,), (own.tool_section_begin_id, own.tool_call_begin_id)
    one = {"tools": FG, "parallel_tool_calls": False}
    table = [
        ({"tools": FG, "tool_choice": "required"}, end, openers),
        ({"tools": FG, "tool_choice": "required"} | OFF, (), ()),
        (one, (), openers),
        (one | OFF, (), openers),
        (one | {"regex": "a"}, end, openers),
        (one | {"regex": "a"} | OFF, (), ()),
        (one | {"regex": "a", "tool_choice": "none"}, end, ()),
    ]
    for fields, begins_after, begins_at in table:
        outputs, _ = bound(server, **fields)
        assert (outputs.begins_after, outputs.begins_at) == (begins_after, begins_at), fields


@pytest.mark.parametrize("names", [["mcp.files.read", "mcpXfiles", "a-b_2", "x", "x:1", "n" * 64]])
def test_b053_names_with_punctuation(server, names):
    outputs, _ = bound(server, tools=[tool(name) for name in names], tool_choice="required", **OFF)
    assert all(takes(outputs, section(call(name, number=n))) for name in names for n in (0, 1, 10, 99_999))
    assert not takes(outputs, section(call("mcpXfilesXread")))
    for name in ("a b", "n" * 65, "", "é", "a\n", "f<|im_end|>"):
        error = server.refusal(CHAT, {"messages": HI, "tools": [tool(name)]})
        assert error["param"] == "tools[0].function.name"


def test_b046_a_choice_without_tools(server):
    for fields in ({"tool_choice": "none"}, {"tool_choice": None}, {"tools": None, "tool_choice": "none"},
                   {"tools": []}, {"tools": None}, {"parallel_tool_calls": False}):  # fmt: skip
        assert bound(server, **fields)[0] is None
    for choice in ("none", "auto", "required"):
        assert server.refusal(CHAT, {"messages": HI, "tools": [], "tool_choice": choice})["param"] == "tool_choice"


@pytest.mark.parametrize(
    "choice",
    ["required", "sometimes", "", named("h"), {"type": "function"}, {"type": "function", "function": {}}, {},
     {"type": "function", "function": {"name": 5}}, allowed("auto"), allowed("never", "f"), allowed("auto", "h"),
     {"type": "allowed_tools"}, {"type": "custom", "custom": {"name": "f"}}],
)  # fmt: skip
def test_b047_choices_that_make_no_sense(server, choice):
    tools = None if choice == "required" else FG
    for stream in (False, True):
        error = server.refusal(CHAT, {"messages": HI, "tools": tools, "tool_choice": choice, "stream": stream})
        assert error["param"] == "tool_choice"
    assert not server.core.requests


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": [tool("f"), tool("g", NOT, strict=True)]}, "tools[1].function.parameters"),
        (
            {"tools": [tool("f", {"properties": {"x": {"type": "string", "pattern": "["}}}, strict=True)]},
            "tools[0].function.parameters",
        ),
        ({"tools": [tool("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(f"f{i}") for i in range(1025)]}, "tools"),
        ({"tools": FG, "grammar": 'start: "a"'}, "grammar"),
        ({"tools": FG, "regex": "("}, "regex"),
        ({"tools": FG, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_cannot_be_bound_is_refused(server, fields, param):
    error = server.refusal(CHAT, {"messages": HI} | fields)
    assert error["param"] == param and not server.core.requests


def test_a_forced_call_is_bound_as_far_as_its_schema_can_be(server):
    pattern = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}
    tools = [tool("f", NOT), tool("g", pattern)]
    outputs, answer = bound(server, tools=tools, tool_choice="required", **OFF)
    assert takes(outputs, section(call("f"), call("g", '{"y": 2}')))
    assert not takes(outputs, section(call("f", '{"x": "a"}')))
    assert [warning.split(" ", 1)[0] for warning in answer["warnings"]] == [
        "tools[0].function.parameters", "tools[1].function.parameters",
    ]  # fmt: skip


def test_200_tools_take_linear_time(server):
    def build(count):
        functions = [BoundFunction(f"tool_{i}", X) for i in range(count)]
        return tool_grammar(ToolMarkup.of(tokenizer()), functions, True)

    assert len(build(200)) < 2.2 * len(build(100))
    tools = [tool(f"tool_{i}", strict=True) for i in range(200)]
    started = time.process_time()
    outputs, _ = bound(server, tools=tools, tool_choice="required", **OFF)
    assert time.process_time() - started < 10
    assert takes(outputs, section(call("tool_7"), call("tool_199"))) and not takes(outputs, section(call("tool_200")))


def test_two_functions_of_one_name_are_refused(server):
    for path in (CHAT, f"{CHAT}/render", "/tokenize"):
        error = server.refusal(path, {"messages": HI, "tools": [tool("f"), tool("g"), tool("f", {})]})
        assert error["param"] == "tools[2].function.name" and "tools[0]" in error["message"]


def emitted(server, text, **fields):
    """(message, finish_reason) of an answer the engine was free to give, the same streamed and not."""
    server.core.default_script = emit(text)
    choice = server.chat(tools=FG, **OFF, **fields)["choices"][0]
    chunks = server.chat_chunks(tools=FG, **OFF, **fields)
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    joined = "".join(call["function"].get("arguments", "") for call in calls)
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    message = choice["message"]
    assert joined == "".join(c["function"]["arguments"] for c in message.get("tool_calls") or ())
    assert (
        content == (message["content"] or "") and chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    )
    return message, choice["finish_reason"]


def test_b041_a_named_call_holds_its_arguments_alone(server):
    message, reason = emitted(server, "ok " + section(call("g")), tool_choice=named("g"))
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "g", "arguments": '{"x": 1}'}]
    assert message["content"].strip() == "ok" and reason == "tool_calls"


@pytest.mark.parametrize("text", ["some prose", "", '{"a":1}', "[1]", "hello"])
@pytest.mark.parametrize("choice", ["required", named("f")])
def test_b048_b051_prose_where_a_call_was_required_is_content(server, caplog, choice, text):
    message, reason = emitted(server, text, tool_choice=choice)
    assert (message["content"] or "") == text and not message.get("tool_calls") and reason == "stop"
    assert not [record for record in caplog.records if record.exc_info]
