"""Tool calls over HTTP: what each way of writing them becomes, streamed in several cuts and not streamed."""

from __future__ import annotations

import json
import logging
import threading

import httpx
import pytest

from tests.engine.server.harness import HI, RunningServer, both, emit, make_core, message_of, serving, tokenizer
from tests.engine.server.markup import AB, CB, CE, MARKERS, SB, SE, call, called, declare, section

CHAT = "/v1/chat/completions"
LONG = "n" * 64
TOOLS = declare("a", "b", "f", "exec", "mcp.files.read", "a-b_2", "x:y", LONG)
X1, Y2 = '{"x":1}', '{"y":2}'
SPELLED = "<|tool_call_section_begin|>"


@pytest.fixture(scope="module")
def shared_server():
    """With room for the declarations, which take a token a byte here."""
    with serving(make_core(max_model_len=100_000)) as running:
        yield running


def calls_of(*pairs: tuple[str, str]) -> list[tuple[str, str, str]]:
    return [(f"functions.{name}:{n}", name, arguments) for n, (name, arguments) in enumerate(pairs)]


ROWS = {
    # What Kimi should write.
    "b003_two_calls": (
        "</think>" + section(call("functions.a:0", X1), call("functions.b:1", Y2)),
        (None, None, [("a", X1), ("b", Y2)], "tool_calls"),
    ),
    "b018_section_in_the_reasoning": (
        "let me look" + section(call("functions.f:0")),
        ("let me look", None, [("f", "{}")], "tool_calls"),
    ),
    "b034_three_calls": (
        "t</think>so " + section(call("functions.a:0", X1), call("functions.a:1", Y2), call("functions.b:2", X1)),
        ("t", "so ", [("a", X1), ("a", Y2), ("b", X1)], "tool_calls"),
    ),
    "b029_nothing_of_a_marker_shows": (
        f"t</think>ok {SB} {CB} functions.a:0 {AB} {X1} {CE}\n{SE}",
        ("t", "ok ", [("a", f" {X1} ")], "tool_calls"),
    ),
    # What it writes as well.
    "b036_no_section": ("</think>" + call("functions.a:0", X1), (None, None, [("a", X1)], "tool_calls")),
    "no_section_in_the_reasoning": ("hm" + call("functions.a:0", X1), ("hm", None, [("a", X1)], "tool_calls")),
    "section_end_missing": (f"</think>{SB}" + call("functions.a:0", X1), (None, None, [("a", X1)], "tool_calls")),
    "call_end_missing": (
        f"</think>{SB}{CB}functions.a:0{AB}{X1}{CB}functions.b:1{AB}{Y2}{SE}",
        (None, None, [("a", X1), ("b", Y2)], "tool_calls"),
    ),
    "all_ends_missing": (f"</think>{SB}{CB}functions.a:0{AB}{X1}", (None, None, [("a", X1)], "tool_calls")),
    "no_arguments": ("</think>" + section(call("functions.a:0", " ")), (None, None, [("a", "{}")], "tool_calls")),
    "text_behind": ("</think>" + section(call("a", X1)) + "bye", (None, "bye", [("a", X1)], "tool_calls")),
    "wrong_number": ("</think>" + section(call("functions.a:7", X1)), (None, None, [("a", X1)], "tool_calls")),
    "no_json": ("</think>" + section(call("f:0", "x\n")), (None, None, [("f", "x\n")], "tool_calls")),
    "b030_no_punctuation": (
        "</think>" + section(call("functionsexec5", X1), call("functions.exec5"), call("exec:5")),
        (None, None, [("exec", X1), ("exec", "{}"), ("exec", "{}")], "tool_calls"),
    ),
    "b053_names": (
        "</think>" + section(*(call(f"functions.{n}:0", X1) for n in ("mcp.files.read", "a-b_2", "x:y", LONG))),
        (None, None, [(n, X1) for n in ("mcp.files.read", "a-b_2", "x:y", LONG)], "tool_calls"),
    ),
    # What is no call is content, and only that.
    "b030_undeclared": (
        "</think>" + section(call("functions.unknown:0", X1)),
        (None, "functions.unknown:0" + X1, None, "stop"),
    ),
    "undeclared_beside_a_call": (
        "</think>" + section(call("functions.no:0", X1), call("functions.a:1", Y2)),
        (None, "functions.no:0" + X1, [("a", Y2)], "tool_calls"),
    ),
    "b032_no_call_in_the_section": ("</think>" + section("not a call"), (None, "not a call", None, "stop")),
    "header_alone": (f"</think>{SB}{CB}functions.a:0{CE}{SE}", (None, "functions.a:0", None, "stop")),
    "header_cut_by_the_end": (f"</think>{SB}{CB}functions.a", (None, "functions.a", None, "stop")),
    "no_call_begin": (f"</think>{SB}functions.a:0{AB}{X1}{CE}{SE}", (None, "functions.a:0" + X1, None, "stop")),
    "empty_section": ("</think>hi" + section(" \n"), (None, "hi", None, "stop")),
    "stray_ends": (f"a{CE}b{SE}</think>c{AB}d{CE}e{SE}f", ("ab", "cdef", None, "stop")),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_an_answer_becomes(server, name):
    script, (reasoning, content, calls, reason) = ROWS[name]
    message, finish_reason, usage = both(server, script, tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    assert called(message) == (calls and calls_of(*calls))
    assert finish_reason == reason
    assert usage["completion_tokens"] == len(emit(script)) + 1
    assert not any(marker in json.dumps(message) for marker in MARKERS)


def test_b036_a_marker_spelled_in_ordinary_tokens_is_text(server):
    """So is a singular spelling, which is no control token."""
    body = emit(call("functions.a:0", X1))
    ids = [*emit("</think>"), *tokenizer().encode(SPELLED + SB), *body, *tokenizer().encode(SE)]
    message, reason, _ = both(server, ids, tools=TOOLS)
    assert (message["content"], called(message), reason) == (SPELLED + SB + SE, calls_of(("a", X1)), "tool_calls")


def test_calls_without_thinking(server):
    fields = {"tools": TOOLS, "thinking": {"type": "disabled"}}
    message, reason, usage = both(server, "ok" + section(call("functions.a:0", X1)), **fields)
    assert (message["content"], called(message), reason) == ("ok", calls_of(("a", X1)), "tool_calls")
    assert "reasoning" not in message and usage["completion_tokens_details"]["reasoning_tokens"] == 0
    message, _, _ = both(server, section(call("functions.a:0", X1)), **fields)
    assert message["content"] is None
    message, _, _ = both(server, "", **fields)
    assert message["content"] == "" and "tool_calls" not in message


def test_reasoning_tokens_end_where_a_section_begins(server):
    for script in ("look" + section(call("a")), "look" + call("a"), "loo</think>" + section(call("a"))):
        _, _, usage = both(server, script, tools=TOOLS)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 4


B025 = f"</think>{SB}" + call("functions.a:0", X1) + f'{CB}functions.b:1{AB}{{"y":'


@pytest.mark.parametrize(
    ("end", "content", "calls"),
    [
        (B025, None, [("a", X1), ("b", '{"y":')]),
        (B025[: B025.index('{"y"')], None, [("a", X1), ("b", "")]),
        (f"</think>{SB}" + call("functions.a:0", X1) + f"{CB}functions.b", "functions.b", [("a", X1)]),
        (f"</think>{SB}{CB}functions.a:0{AB}" + X1, None, [("a", X1)]),
        (f"</think>{SB}", None, None),
    ],
)
def test_b025_the_budget_ends_within_a_section(server, end, content, calls):
    """What there is comes whole; the reason says that the last call may not be."""
    fields = {"tools": TOOLS, "max_tokens": len(emit(end))}
    message, reason, usage = both(server, emit(end) + emit("2}" + CE + SE), **fields)
    assert (message["content"], called(message), reason) == (content, calls and calls_of(*calls), "length")
    assert usage["completion_tokens"] == len(emit(end))


def test_b026_20000_characters_of_arguments(server):
    arguments = json.dumps({"text": '漢\\😀"x ' * 3000}, ensure_ascii=False)
    assert len(arguments) > 20_000
    server.core.default_script, server.core.tokens_per_step = emit("t" + section(call("functions.a:0", arguments))), 50
    assert called(message_of(server.chat_chunks(tools=TOOLS))) == calls_of(("a", arguments))
    assert called(server.chat(tools=TOOLS)["choices"][0]["message"]) == calls_of(("a", arguments))


def test_b033_an_end_and_the_next_begin_in_one_step(server):
    first = len(emit("t" + SB + CB + "functions.a:0" + AB + X1))
    server.core.default_script = emit("t" + section(call("functions.a:0", X1), call("functions.b:1", Y2)))
    for before in (0, 1, 2):
        server.core.tokens_per_step = [first - before, 2 + before, 1000]
        assert called(message_of(server.chat_chunks(tools=TOOLS))) == calls_of(("a", X1), ("b", Y2))


@pytest.mark.parametrize("cut", [1, 1000])
def test_b038_b043_b044_the_form_of_a_stream(server, cut):
    """The role once, of each call a header and then its arguments, one finish reason behind the last of them."""
    server.core.default_script = emit("why" + section(call("functions.a:0", X1), call("functions.b:1", Y2)))
    server.core.tokens_per_step = cut
    choices = [chunk["choices"][0] for chunk in server.chat_chunks(tools=TOOLS)]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    headers = [part for part in parts if "id" in part]
    assert headers == [
        {"index": n, "id": f"functions.{name}:{n}", "type": "function", "function": {"name": name, "arguments": ""}}
        for n, name in enumerate("ab")
    ]
    assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)
    assert all(part.keys() == {"index", "function"} for part in parts if part not in headers)
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert choices[-1]["delta"] == {} and "tool_calls" in choices[-2]["delta"]


def test_openais_sdk_reads_calls(server):
    server.core.default_script = emit("why</think>ok " + section(call("functions.a:0", X1), call("functions.b:1", Y2)))
    client = server.openai()
    whole = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
    with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        streamed = stream.get_final_completion()
    for answer in (whole, streamed):
        message = answer.choices[0].message
        assert [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls] == calls_of(
            ("a", X1), ("b", Y2)
        )
        assert (message.content, answer.choices[0].finish_reason) == ("ok ", "tool_calls")
        assert message.reasoning == message.reasoning_content == "why"


def test_b049_arguments_flow_while_they_are_written(server):
    """Each step's characters are out before the next step is let through."""
    server.core.default_script = emit("</think>" + CB + "a" + AB + '{"x":"yyyyyyyyyyyyyyyy"}')
    server.core.gate = gate = threading.Semaphore(4)
    try:
        body = {"messages": HI, "tools": TOOLS, "stream": True}
        with server.http() as http, http.stream("POST", CHAT, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            while "functions.a:0" not in next(lines):
                pass
            for character in '{"x":"yyyyyyyyyyyyyyyy"}':
                gate.release()
                delta = json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]
                assert delta == {"tool_calls": [{"index": 0, "function": {"arguments": character}}]}
            gate.release()
            assert '"finish_reason":"tool_calls"' in next(lines).replace(" ", "")
    finally:
        server.core.gate = None


@pytest.mark.parametrize("fields", [{"tools": TOOLS, "tool_choice": "none"}, {}, {"tools": None}])
def test_b045_markup_is_text_where_no_tool_may_be_called(server, fields):
    answer = "A call is written " + section(call("functions.a:0", X1))
    message, reason, _ = both(server, "t</think>" + answer, **fields)
    assert (message["content"], called(message), reason) == (answer, None, "stop")
    message, _, _ = both(server, "t" + answer, **fields)
    assert message["reasoning_content"] + message["content"] == "t" + answer and message["content"].startswith(SB)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tool_choice": None}, {"tools": None}, {"tools": []}])
def test_b046_no_choice_without_tools(server, fields):
    assert server.chat(**fields)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "sometimes", "tools": TOOLS},
        {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": TOOLS},
        {"tool_choice": "auto", "tools": []},
        {"tool_choice": "none", "tools": []},
    ],
)
def test_b046_b047_senseless_choices(server, fields):
    assert server.refusal(CHAT, {"messages": HI} | fields)["param"] == "tool_choice"


@pytest.mark.parametrize("name", ["", "n" * 65, "a b", "a/b", "é"])
def test_b053_names_outside_the_form(server, name):
    assert server.refusal(CHAT, {"messages": HI, "tools": declare(name)})["param"] == "tools[0].function.name"


def test_b048_the_reason_is_never_tool_calls_without_a_call(server):
    for script in ("prose", "</think>prose", "</think>" + section(), "</think>" + section(call("functions.no:0"))):
        message, reason, _ = both(server, script, tools=TOOLS)
        assert "tool_calls" not in message and reason == "stop"


@pytest.mark.parametrize("stop", ["zzz", ["z", "functions.az"]])
def test_b097_a_stop_string_holds_no_marker_back(server, stop):
    message, _, _ = both(server, "hi</think>", stop=stop, tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("hi", None)
    script = "hi</think>" + section(call("functions.a:0", X1), call("functions.b:1", Y2))
    message, reason, _ = both(server, script, stop=stop, tools=TOOLS)
    assert (message["reasoning_content"], message["content"]) == ("hi", None)
    assert (called(message), reason) == (calls_of(("a", X1), ("b", Y2)), "tool_calls")


@pytest.mark.parametrize(
    ("stop", "calls"),
    [
        ({"stop": '"}'}, [("a", '{"s":"t')]),
        ({"stop": CE}, [("a", '{"s":"t"}')]),
        ({"stop": "_section_end"}, [("a", '{"s":"t"}')]),
        ({"stop_token_ids": [ord("}")]}, [("a", '{"s":"t"')]),
    ],
)
def test_an_answer_that_the_caller_stops_is_no_turn_to_call(server, stop, calls):
    """The model did not end it, so the last call may miss its end."""
    message, reason, _ = both(server, "</think>" + section(call("functions.a:0", '{"s":"t"}')), tools=TOOLS, **stop)
    assert (called(message), reason) == (calls_of(*calls), "stop")


def test_a_stop_token_behind_the_calls_ends_a_turn(server):
    """As clients stop at the section's end."""
    stop = {"stop_token_ids": emit(SE)}
    message, reason, _ = both(server, "</think>" + section(call("functions.a:0", X1)), tools=TOOLS, **stop)
    assert (called(message), reason) == (calls_of(("a", X1)), "tool_calls")


def test_several_choices_each_with_calls(server):
    scripts = [
        emit("r0" + section(call("functions.a:0", X1))),
        emit("r1</think>plain"),
        emit("</think>" + section(call("b", Y2), call("a", X1))),
    ]
    fields = {"n": 3, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    server.core.scripts.extend(scripts)
    whole = server.chat(**fields)["choices"]
    server.core.scripts.extend(scripts)
    server.core.tokens_per_step = [3, 1, 7]
    chunks = server.chat_chunks(**fields)
    for index, (script, choice) in enumerate(zip(scripts, whole, strict=True)):
        message = choice["message"]
        assert message_of(chunks, index) == {k: message.get(k) for k in ("content", "reasoning_content", "tool_calls")}
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        # Every id has its logprob and place in the stream, markers and the end token too.
        expected = [*script, tokenizer().im_end_id]
        assert choice["token_ids"] == [i for c in own for i in c.get("token_ids") or []] == expected
        streamed = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert choice["logprobs"]["content"] == streamed and len(streamed) == len(expected)
    assert [called(c["message"]) for c in whole] == [calls_of(("a", X1)), None, calls_of(("b", Y2), ("a", X1))]
    assert [c["finish_reason"] for c in whole] == ["tool_calls", "stop", "tool_calls"]


def history(*ids: str) -> list[dict]:
    """A conversation with a call of f and its result for each id."""
    messages: list[dict] = [{"role": "user", "content": "go"}]
    for given in ids:
        function = {"name": "f", "arguments": "{}"}
        made = [{"id": given, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": None, "tool_calls": made})
        messages.append({"role": "tool", "tool_call_id": given, "content": f"result of {given}"})
    return messages


@pytest.mark.parametrize("ids", [("functions.f:0", "functions.f:1"), ("call_abc", "call_def"), ("x", "x")])
def test_b001_ids_count_over_the_conversation(server, ids):
    """Whatever the model wrote; and the next turn's prompt is what the template makes of ids in Kimi's form."""
    messages = history(*ids)
    message, _, _ = both(
        server, "</think>" + section(call("functions.f:0"), call("functions.f:0")), messages=messages, tools=TOOLS
    )
    assert [i for i, _, _ in called(message)] == ["functions.f:2", "functions.f:3"]
    followed = [*messages, message, {"role": "tool", "tool_call_id": "functions.f:2", "content": "done"}]
    server.chat(messages=followed, tools=TOOLS)
    prompt = server.core.requests[-1][1]
    text = tokenizer().decode(prompt, skip_special_tokens=False)
    for number, given in enumerate(ids):
        assert f"{CB}functions.f:{number}{AB}" in text
        assert f"## Return of functions.f:{number}\nresult of {given}" in text
    assert f"{CB}functions.f:2{AB}" in text and "## Return of functions.f:2\ndone" in text
    reference = [*history("functions.f:0", "functions.f:1"), *followed[5:]]
    reference[2]["content"], reference[4]["content"] = (f"result of {given}" for given in ids)
    assert prompt == server.core.chat_template.encode(tokenizer(), reference, TOOLS)


def test_what_cannot_be_read_is_counted_and_logged_without_its_text(server: RunningServer, caplog):
    def count() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
        found = (line for line in lines if line.startswith("turnout_tool_call_parse_errors_total{"))
        return {line.split('"')[1]: float(line.split()[-1]) for line in found}

    before = count()
    logger = logging.getLogger("turnout.server")
    propagates, logger.propagate = logger.propagate, True
    try:
        server.core.default_script = emit("</think>" + section("SECRET", call("SECRET2"), call("a")))
        server.chat(tools=TOOLS)
        server.core.default_script = emit("</think>" + section(call("a")))
        server.chat(tools=TOOLS)
    finally:
        logger.propagate = propagates
    assert count() == {"malformed": before["malformed"] + 1, "undeclared_function": before["undeclared_function"] + 1}
    lines = [record.getMessage() for record in caplog.records if "tool call" in record.getMessage()]
    assert len(lines) == 1 and "chatcmpl-" in lines[0] and "malformed" in lines[0]
    assert "SECRET" not in caplog.text


def test_200_tools_and_a_call_of_the_last(server):
    tools = declare(*(f"tool_{n}" for n in range(200)))
    message, reason, _ = both(server, "</think>" + section(call("functions.tool_199:0", X1)), tools=tools)
    assert (called(message), reason) == (calls_of(("tool_199", X1)), "tool_calls")
