"""The small routes: what the server is, what a prompt looks like, whether it generates, and ending calls by name."""

import json
import logging
import threading

import pytest

from engine.server import admin, responses
from tests.engine.server.harness import HI, check, emit, error_of, make_core, read_stream, serving
from tests.processes import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def gated():
    """A server whose core takes a step only when its gate is released."""
    core = make_core(default_script=emit("thoughts</think>answer"), gate=threading.Semaphore(0))
    with serving(core) as server:
        yield server
        core.gate.release(10**4)


def ask(server, answers: list, path: str = CHAT, headers: dict | None = None, **fields) -> threading.Thread:
    body = ({"messages": HI} if path == CHAT else {"prompt": "a"}) | fields
    thread = threading.Thread(target=lambda: answers.append(server.post(path, body, headers=headers or {})))
    thread.start()
    return thread


def test_a_rendered_prompt_is_the_one_that_is_answered(server):
    for fields in ({}, {"tools": [TOOL]}, {"thinking": {"type": "disabled"}}, {"temperature": 0.5, "stream": True}):
        answer = server.post(f"{CHAT}/render", {"messages": HI} | fields)
        rendered = check(responses.RenderedChat, answer.json())
        whole = server.chat(**fields | {"stream": False}, return_token_ids=True)
        assert rendered["prompt_token_ids"] == whole["prompt_token_ids"]
        assert rendered["count"] == len(rendered["prompt_token_ids"]) and rendered["model"] == "tiny"
        tokens = server.post("/v1/tokenize", {"prompt": rendered["prompt"]}).json()["tokens"]
        assert tokens == rendered["prompt_token_ids"]
    before = len(server.core.requests)
    long = [{"role": "user", "content": "x" * 1000}]
    assert server.post(f"{CHAT}/render", {"messages": long, "nope": 1}).json()["warnings"]
    assert len(server.core.requests) == before, "nothing was generated"
    assert server.refusal(f"{CHAT}/render", {"messages": [{"role": "robot"}]})["param"] == "messages[0].role"
    for wrong in ({"stream_options": {}}, {"request_id": "a b"}, {"stream": True, "prompt_logprobs": 1}):
        body = {"messages": HI} | wrong
        assert server.refusal(f"{CHAT}/render", body) == server.refusal(CHAT, body)
    assert server.refusal(f"{CHAT}/render", {"messages": HI, "model": "gpt"}, 404)["code"] == "model_not_found"


def test_what_the_server_says_of_itself(server):
    with server.http() as http:
        info = check(responses.ServerInfo, http.get("/server_info").json())
        tokenizer = check(responses.TokenizerInfo, http.get("/tokenizer_info").json())
        cards = check(responses.ModelList, http.get("/v1/models").json())["data"]
        for name in ("tiny", "kimi"):
            assert http.get(f"/v1/models/{name}").json()["id"] == name
    assert info["served_model_names"] == [card["id"] for card in cards] == ["tiny", "kimi"]
    assert info["engine"]["tp"] == 1 and info["limits"]["body_bytes"] == 8 * 2**20 and not info["has_draft"]
    assert not any(isinstance(value, str) and "/" in value for value in info["engine"].values()), "no paths"
    assert tokenizer["eos_token"] == "[EOS]"
    assert tokenizer["model_max_length"] == info["max_model_len"] == cards[0]["max_model_len"]


def test_lm_eval_finds_what_it_probes(server):
    """The tokenizer's facts, then ids without special tokens added, then text again."""
    for prefix in ("", "/v1"):
        ids = server.post(f"{prefix}/tokenize", {"prompt": "abc", "add_special_tokens": False}).json()["tokens"]
        assert server.post(f"{prefix}/detokenize", {"tokens": ids}).json() == {"prompt": "abc"}


def test_one_token_through_the_engine(gated, monkeypatch):
    gated.core.gate.release(5)
    with gated.http() as http:
        assert http.get("/health_generate").json() == {"status": "ok"}
        assert gated.core.requests[-1][2].max_tokens == 1
        monkeypatch.setattr(admin, "PROBE_SECONDS", 0.05)
        until(lambda: not gated.core.gate.acquire(blocking=False), 10, "no step may be taken")
        assert error_of(http.get("/health_generate"), 503)["code"] == "no_token"
        gated.core.wait_for(lambda: not gated.core.running)
        assert http.get("/health").status_code == 200
        gated.core.lose_a_rank()
        assert error_of(http.get("/health_generate"), 503)["code"] == "engine_dead"


@pytest.mark.parametrize("kind", ["answer", "header", "body", "all"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_ended_by_name(gated, kind, stream):
    """The others go on. The answer that is ended says so and keeps what it had."""
    core, answers, other = gated.core, [], []
    call = ask(gated, answers, headers={"x-request-id": "mine"}, request_id="body-1", stream=stream, n=2)
    core.wait_for(lambda: len(core.running) == 2)
    rest = ask(gated, other, COMPLETIONS)
    core.wait_for(lambda: len(core.running) == 3)
    core.gate.release(2)
    until(lambda: all(s.num_tokens == 2 for s in core.running.values()), 10, "both have tokens")
    names = {"answer": "chatcmpl-body-1", "header": "mine", "body": "body-1"}
    body = {"abort_all": True} if kind == "all" else {"request_id": names[kind]}
    assert gated.post("/abort_request", body).json() == {"num_aborted": 2 if kind == "all" else 1}
    call.join(20)
    assert answers[0].headers["x-request-id"] == "mine"
    if stream:
        data = read_stream(answers[0])
        assert data[-1] == "[DONE]" and sum('"finish_reason":"abort"' in item for item in data) == 2
    else:
        answer = check(responses.ChatCompletion, answers[0].json())
        assert answer["id"] == names["answer"]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort", "abort"]
        assert answer["usage"]["completion_tokens"] == 4
    core.gate.release(10**4)
    rest.join(20)
    expected = "abort" if kind == "all" else "length"
    assert other[0].json()["choices"][0]["finish_reason"] in (expected, "stop")
    assert not core.running and not gated.client._running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("scored", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_completion_that_is_ended_before_its_prompt_was_scored(gated, stream, scored, max_tokens):
    """It says so, and has no scores."""
    if stream and "prompt_logprobs" in scored:
        pytest.skip("prompt_logprobs are not streamed")
    answers: list = []
    echo = "echo" in scored or max_tokens == 0
    call = ask(gated, answers, COMPLETIONS, stream=stream, max_tokens=max_tokens, **scored | {"echo": echo})
    gated.core.wait_for(lambda: gated.core.running)
    assert gated.post("/abort_request", {"abort_all": True}).json() == {"num_aborted": 1}
    call.join(20)
    assert answers[0].status_code == 200
    if stream:
        [event, _] = read_stream(answers[0])
        choice = json.loads(event)["choices"][0]
    else:
        choice = check(responses.Completion, answers[0].json())["choices"][0]
        assert choice.get("prompt_logprobs") is None
    assert choice["finish_reason"] == "abort" and bool(choice["text"]) == echo
    if "logprobs" in scored:
        assert set(choice["logprobs"]["token_logprobs"]) == {None}


def test_a_probe_that_is_aborted_is_no_good_sign(gated):
    answers: list = []

    def probe() -> None:
        with gated.http() as http:
            answers.append(http.get("/health_generate"))

    thread = threading.Thread(target=probe)
    thread.start()
    gated.core.wait_for(lambda: gated.core.running)
    assert gated.post("/abort_request", {"abort_all": True}).json() == {"num_aborted": 1}
    thread.join(20)
    assert error_of(answers[0], 503)["code"] == "no_token"


def test_what_abort_refuses_and_what_it_does_not_find(server):
    for body in ({}, {"request_id": "a", "abort_all": True}, {"request_id": None, "abort_all": False}):
        assert server.refusal("/abort_request", body)["param"] == "request_id"
    assert server.refusal("/abort_request", {"request_id": 5})["param"] == "request_id"
    assert server.post("/abort_request", {"request_id": "nobody"}).json() == {"num_aborted": 0}
    assert server.post("/abort_request", {"abort_all": True}).json() == {"num_aborted": 0}


def test_ids_of_a_call(server, caplog, request):
    """The header's id is echoed, else the body's; the answer's is its own or the body's; the log has both."""
    caplog.set_level(logging.INFO, "turnout")
    logger = logging.getLogger("turnout.access")
    logger.addHandler(caplog.handler)
    request.addfinalizer(lambda: logger.removeHandler(caplog.handler))
    for headers, field, expected in (
        ({"x-request-id": "head-1"}, None, "head-1"),
        ({"x-request-id": "head/1+2=@3"}, None, "head/1+2=@3"),
        ({}, "body-1", "body-1"),
        ({"x-request-id": "head-2"}, "body-2", "head-2"),
        ({"x-request-id": "no good\x01"}, "body-3", "body-3"),
    ):
        first, second = (server.post(COMPLETIONS, {"prompt": "a", "request_id": field}, headers=headers) for _ in "12")
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == expected
        ids = {first.json()["id"], second.json()["id"]}
        assert ids == {f"cmpl-{field}"} if field else len(ids) == 2
        assert "warnings" not in first.json()
        line = f"{expected} {second.json()['id']}"
        until(lambda line=line: any(r.getMessage().endswith(line) for r in caplog.records), 10, "it is in the log")
    for bad in ("", "a b", "x" * 129, "é", "a\nb"):
        assert server.refusal(CHAT, {"messages": HI, "request_id": bad})["param"] == "request_id"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/nope", "/v1/embeddings", "/ping", "/v1/models/nope", "/start_profile"])
def test_unknown_routes_are_404_and_other_methods_405_in_json(server, method, path):
    with server.http() as http:
        response = http.request(method, path, json={})
        wrong_method = path == "/v1/models/nope" and method != "GET"
        error_of(response, 405 if wrong_method else 404)
        if wrong_method:
            assert response.headers["allow"] == "GET"
