"""A prompt that can never fit is refused by its bytes, before it is rendered or encoded; others are not."""

import pytest

from engine.chat_template import ChatTemplate
from engine.server.limits import MAX_TOKENIZED_BYTES
from engine.tokenizer import Tokenizer
from tests.engine.server.harness import HI, tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MOST = 256 * tokenizer().max_token_bytes  # of the context of these tests
LONG = "é" * (MOST // 2) + "x"
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


def user(content):
    return [{"role": "user", "content": content}]


def calls(arguments):
    function = {"name": "f", "arguments": arguments}
    return [
        *HI,
        {"role": "assistant", "tool_calls": [{"id": "functions.f:0", "type": "function", "function": function}]},
    ]


@pytest.fixture
def idle(monkeypatch):
    """Notes what is rendered and encoded."""
    work = []
    for owner, name in ((ChatTemplate, "_render"), (Tokenizer, "encode_with_spans")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, name=name, **k: (work.append(name), real(*a, **k))[1])
    return work


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "path, body",
    [
        (CHAT, {"messages": user(LONG)}),
        (CHAT, {"messages": [{"role": "user", "content": "é" * (MOST // 4)}] * 2 + HI}),
        (CHAT, {"messages": user([{"type": "text", "text": "a"}, {"type": "text", "text": LONG}])}),
        (CHAT, {"messages": calls('{"a": "' + LONG + '"}')}),
        (CHAT, {"messages": calls({"a": [{LONG: 1}]})}),
        (COMPLETIONS, {"prompt": LONG}),
        (COMPLETIONS, {"prompt": ["a", LONG]}),
    ],
)
def test_what_can_never_fit_is_refused_unread(server, idle, path, body, stream):
    error = server.refusal(path, body | {"stream": stream})
    assert error["code"] == "context_length_exceeded" and error["param"] in ("messages", "prompt")
    assert f"({MOST})" in error["message"] and "256 tokens" in error["message"]
    assert not idle


def test_tools_are_weighed_once_they_are_rendered(server, idle):
    error = server.refusal(CHAT, {"messages": HI, "tools": [TOOL]})
    assert error["code"] == "context_length_exceeded" and f"({MOST})" in error["message"]
    assert idle == ["_render"]


def test_what_might_fit_is_encoded_and_what_is_not_shown_does_not_count(server, idle):
    error = server.refusal(COMPLETIONS, {"prompt": LONG[:-1]})
    assert error["code"] == "context_length_exceeded" and "tokens, but" in error["message"] and idle
    assert server.complete(prompt="<|tool_call_argument_begin|>" * 250)["usage"]["prompt_tokens"] == 250
    past = [*HI, {"role": "assistant", "content": "a", "reasoning_content": LONG}, *HI]
    assert server.chat(messages=past)["choices"]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {"prompt": "x" * (MAX_TOKENIZED_BYTES + 1)}, "prompt"),
        ("/tokenize", {"messages": user("x" * (MAX_TOKENIZED_BYTES + 1))}, "messages"),
        (f"{CHAT}/render", {"messages": user("x" * (MAX_TOKENIZED_BYTES + 1))}, "messages"),
    ],
)
def test_what_is_only_looked_at_may_be_longer_than_the_context_up_to_a_limit(server, idle, path, body, param):
    error = server.refusal(path, body)
    assert error["code"] == "limit_exceeded" and error["param"] == param
    assert str(MAX_TOKENIZED_BYTES) in error["message"] and not idle
    short = {"prompt": LONG} if param == "prompt" else {"messages": user(LONG)}
    assert server.post(path, short).json()["count"] > 256
