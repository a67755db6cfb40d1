"""What is too much for one request, or for the context: refused by the name of the limit, or cut as written."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.server.body import validate
from engine.server.errors import ApiError
from engine.server.limits import MAX_BIASES, MAX_MESSAGES, MAX_PARTS, MAX_SCHEMA_BYTES, MAX_TOOLS
from engine.server.protocol import ChatCompletionRequest, DetokenizeRequest
from tests.engine.server.harness import HI, emit, error_of, make_core, serving

ROOT = Path(__file__).resolve().parents[3]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def big_tool(size: int, name: str = "f") -> dict:
    return {"type": "function", "function": {"name": name, "description": "x" * size}}


def nested(levels: int) -> dict:
    value = {"type": "object"}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"messages": HI * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}]},
         "messages[0].content", MAX_PARTS),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * (MAX_PARTS + 1)}]},
         "messages[0].tool_calls", MAX_PARTS),
        ({"tools": [TOOL] * (MAX_TOOLS + 1)}, "tools", MAX_TOOLS),
        ({"tools": [big_tool(MAX_SCHEMA_BYTES // 2)] * 2}, "tools", MAX_SCHEMA_BYTES),
        ({"tools": [TOOL], "response_format": {"x": "y" * MAX_SCHEMA_BYTES}}, "response_format", MAX_SCHEMA_BYTES),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(80)}}]}, "tools", 64),
        ({"logit_bias": {str(i): 1 for i in range(MAX_BIASES + 1)}}, "logit_bias", MAX_BIASES),
        ({"n": 129}, "n", 128),
        ({"stop": ["a"] * 65}, "stop", 64),
        ({"stop": "a" * 1001}, "stop", 1000),
    ],
)  # fmt: skip
def test_too_much_is_refused_by_name(server, fields, param, limit):
    for path in (CHAT, f"{CHAT}/render", "/tokenize"):
        if path == CHAT or not {"n", "stop"} & set(fields):
            error = server.refusal(path, {"messages": HI} | fields)
            assert error["param"] == param and str(limit) in error["message"].replace(",", ""), error
            assert len(error["message"]) < 300
    assert not server.core.requests


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, {"messages": HI, "stop_token_ids": [""] * 10**6}, "stop_token_ids[0]"),
        (ChatCompletionRequest, {"messages": HI, "guided_choice": ["a", *[1] * 10**6]}, "guided_choice[1]"),
        (ChatCompletionRequest, {"messages": [*HI, *[1] * 10**6]}, "messages[1]"),
        (ChatCompletionRequest, {"messages": HI, "tools": [None] * 10**6}, "tools[0]"),
        (DetokenizeRequest, {"tokens": [True] * 10**6}, "tokens[0]"),
    ],
)
def test_a_long_list_of_wrong_entries_costs_no_more_than_one(model, fields, param):
    """An error made of each of them would take seconds, in which nothing else runs, not even the engine's steps."""
    started = time.thread_time()
    with pytest.raises(ApiError) as refused:
        validate(model, fields)
    assert refused.value.param == param and time.thread_time() - started < 1


def test_as_much_as_is_allowed_passes(server):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}] * MAX_PARTS}]
    tools = [big_tool(10_000, f"f{i}") for i in range(200)]
    for fields in ({"messages": HI * MAX_MESSAGES}, {"messages": parts}, {"messages": HI, "tools": tools}):
        answer = server.post("/tokenize", fields)
        assert answer.status_code == 200 and answer.json()["count"] > MAX_PARTS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 300}, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 300}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "x" * 256]}, "prompt"),
    ],
)
def test_b104_a_prompt_that_is_too_long_is_a_400_streamed_or_not(server, path, body, param, stream):
    """B105 too: the message has the limit and the size, and nothing of our insides."""
    error = server.refusal(path, body | {"stream": stream})
    assert error["code"] == "context_length_exceeded" and error["param"] == param
    size = server.post("/tokenize", {"messages": body["messages"]}).json()["count"] if path == CHAT else None
    assert "256" in error["message"] and (size is None or str(size) in error["message"])


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


INSIDES = re.compile(
    r"Traceback|\.pyx?\b|\w(Error|Exception|Request|Params|Fields|Tokenizer|Template)\b|\b(engine|models|tests|draft)[/.]\w"
    r"|pydantic|jinja|llguidance|tiktoken|starlette|fastapi|uvicorn|site-packages|<class|object at 0x|lambda|NoneType"
)
REFUSED = [
    (CHAT, user("x" * 300), 400), (CHAT, user(5), 400), (CHAT, user([{"type": "image_url"}]), 400),
    (CHAT, user("x" * 10_000), 400), (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, 400),
    (CHAT, {"messages": [[]]}, 400), (CHAT, {"messages": {}}, 400), (CHAT, {}, 400), (CHAT, [], 400),
    (CHAT, {"messages": HI, "model": "gpt-4"}, 404), (CHAT, {"messages": HI, "temperature": "hot"}, 400),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, 400),
    (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": {"type": "function"}}, 400),
    (CHAT, {"messages": HI, "guided_json": {"type": "objct"}}, 400), (CHAT, {"messages": HI, "regex": "("}, 400),
    (CHAT, {"messages": HI, "guided_json": {"$ref": "#/nowhere"}}, 400),
    (CHAT, {"messages": HI, "guided_grammar": "start: ((("}, 400), (CHAT, {"messages": HI, "ebnf": "junk"}, 400),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"x": 1}}, 400), (CHAT, {"messages": HI, "logit_bias": [1]}, 400),
    (CHAT, {"messages": HI, "stop": [1]}, 400), (CHAT, {"messages": HI, "stream_options": {}}, 400),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400), (COMPLETIONS, {"prompt": [10**9]}, 400),
    ("/detokenize", {"tokens": [-1]}, 400), ("/tokenize", {}, 400), ("/nope", {}, 404), ("/v1/models", {}, 405),
    ("/abort_request", {"request_id": 5}, 400),
]  # fmt: skip
MALFORMED = (
    b"{",
    b"\xff",
    b'{"messages": NaN}',
    b'{"x": "\\ud800"}',
    b"[" * 100_000,
    b'{"seed": ' + b"9" * 5000 + b"}",
)


@pytest.mark.parametrize("path, body, status", REFUSED)
def test_b105_an_error_tells_nothing_of_our_insides(server, path, body, status):
    error = server.refusal(path, body, status)
    assert not INSIDES.search(error["message"]) and "\n" not in error["message"], error["message"]
    assert str(ROOT) not in json.dumps(error)


def test_b105_nor_does_one_of_a_malformed_body_or_of_a_bug(server, monkeypatch):
    with server.http(headers={"content-type": "application/json"}) as http:
        errors = [error_of(http.post(CHAT, content=raw), 400) for raw in MALFORMED]
        errors.append(error_of(http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415))
    monkeypatch.setattr("engine.server.chat.chat_params", lambda *_: [].missing)
    errors.append(server.refusal(CHAT, {"messages": HI}, 500))
    assert not any(INSIDES.search(error["message"]) or str(ROOT) in json.dumps(error) for error in errors), errors
    assert INSIDES.search("AttributeError: ...") and INSIDES.search("in engine/llm.py") and len(errors) == 8


def test_too_many_prompts_are_refused_before_any_is_encoded(server, monkeypatch):
    encoded = []
    monkeypatch.setattr(server.client, "tokenizer", SimpleNamespace(encode=lambda *a, **k: encoded.append(a)))
    for fields in ({"prompt": ["a"] * 1025}, {"prompt": ["a"] * 9, "n": 128}, {"prompt": [[97]] * 513, "n": 2}):
        error = server.refusal(COMPLETIONS, fields)
        assert error["param"] == "prompt" and "1024" in error["message"]
    assert not encoded


@pytest.mark.parametrize("stream", [False, True])
def test_b106_more_tokens_than_the_context_leaves_are_cut_to_it(stream):
    """A prompt of 60 tokens, a context of 64: four come, in both endpoints, and the reason is length."""
    with serving(make_core(max_model_len=64, default_script=emit("a" * 100))) as server:
        prompt = [97] * 60
        chat_room = 64 - server.post("/tokenize", {"messages": HI}).json()["count"]
        for path, body, room in (
            (COMPLETIONS, {"prompt": prompt, "max_tokens": 1000}, 4),
            (CHAT, {"messages": HI, "max_completion_tokens": 1000}, chat_room),
            (CHAT, {"messages": HI, "max_tokens": 1000}, chat_room),
        ):
            body |= {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
            if stream:
                *chunks, last = server.events(path, body)
                usage, reason = last["usage"], chunks[-1]["choices"][0]["finish_reason"]
            else:
                answer = server.post(path, body).json()
                usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
            assert (usage["completion_tokens"], reason) == (room, "length")
        assert error_of(server.post(COMPLETIONS, {"prompt": [97] * 64}), 400)["code"] == "context_length_exceeded"
