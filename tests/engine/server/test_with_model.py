"""The server over the real core and the bundled checkpoint: what the fake core takes for granted, proven once."""

import json
import socket
import threading
import time

import pytest

from engine.config import EngineConfig
from engine.launch import start_engine
from tests.engine.server.harness import HI, read_stream, request_bytes, serving, texts

GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server():
    core, _ = start_engine(EngineConfig(device="cpu", num_threads=1, max_model_len=256))
    with serving(core) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"chat_template_kwargs": {"thinking": False}},
        {"stop": ["a", "the"]},
        {"skip_special_tokens": False, "ignore_eos": True},
        {"n": 2, "logit_bias": {"5": 3}},
    ],
)
def test_streamed_and_single_answers_are_one(server, fields):
    whole = server.chat(**GREEDY, **fields, logprobs=True, top_logprobs=3, return_token_ids=True)
    options = {"include_usage": True}
    chunks = server.chat_chunks(
        **GREEDY, **fields, logprobs=True, top_logprobs=3, return_token_ids=True, stream_options=options
    )
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        joined = texts(chunks, choice["index"])
        for key in ("content", "reasoning_content"):
            assert joined.get(key, "") == (choice["message"].get(key) or "")
        assert [t for c in own for t in c.get("token_ids", ())] == choice["token_ids"]
        entries = choice["logprobs"]["content"]
        assert [e for c in own if c["logprobs"] for e in c["logprobs"]["content"]] == entries
        assert len(entries) == len(choice["token_ids"]) and all(len(e["top_logprobs"]) == 3 for e in entries)
        assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_scoring_a_prompt(server):
    prompt = "The cat sat on the mat."
    scored = server.complete(prompt=prompt, echo=True, max_tokens=0, logprobs=1, temperature=0)["choices"][0]
    also = server.complete(prompt=prompt, echo=True, max_tokens=1, logprobs=1, temperature=0)["choices"][0]
    assert scored["text"] == prompt and also["text"].startswith(prompt)
    count = len(scored["logprobs"]["tokens"])
    assert scored["logprobs"]["tokens"] == also["logprobs"]["tokens"][:count]
    assert scored["logprobs"]["token_logprobs"][1:] == pytest.approx(also["logprobs"]["token_logprobs"][1:count])
    assert "".join(scored["logprobs"]["tokens"]) == prompt


def test_b181_a_pattern_that_meets_a_limit_is_the_error_of_its_own_request(server):
    """Found while the answer is written: 400, in a stream once what there is was sent; the server goes on."""
    fields = {"prompt": "a", "max_tokens": 200, "temperature": 0}
    fields["structured_outputs"] = {"regex": "(([a-z]{1,50}){1,50}){1,50}"}
    assert server.refusal("/v1/completions", fields)["code"] == "grammar_dead_end"
    data = read_stream(server.post("/v1/completions", fields | {"stream": True}))
    assert json.loads(data[-1])["error"]["code"] == "grammar_dead_end"
    (choice,) = server.complete(prompt="a", max_tokens=9, structured_outputs={"choice": ["yes", "no"]})["choices"]
    assert choice["text"] in ("yes", "no") and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_blocks(server, stream):
    fields = {"messages": HI, "temperature": 0, "ignore_eos": True, "stream": stream, "n": 2}
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(request_bytes("/v1/chat/completions", fields))
    _wait_for(lambda: server.core.stats().num_running == 2)
    if stream:
        assert connection.recv(100)
    connection.close()
    _wait_for(lambda: not server.core.has_unfinished())
    stats = server.core.stats()
    assert stats.kv_cache_usage == 0 and stats.num_running == 0 and server.client.is_healthy
    assert server.chat(**GREEDY)["choices"]


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
