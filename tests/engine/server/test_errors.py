"""Bad requests, keys, unknown routes and models: always the nested body, never a 422 or a 500."""

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.server import responses
from tests.engine.server.harness import HI, check, error_of, make_core, read_stream, serving

CHAT = "/v1/chat/completions"
POSTS = (CHAT, "/v1/completions", "/tokenize", "/detokenize")


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1), ("temperature", 3), ("temperature", "hot"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2),
        ("n", 0), ("n", 10**6), ("n", "2"), ("n", True), ("n", 1.0),
        ("presence_penalty", 9), ("frequency_penalty", -3), ("repetition_penalty", 0),
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_completion_tokens", 0),
        ("seed", 2**63), ("seed", 10**40), ("seed", "x"), ("min_tokens", -1),
        ("top_logprobs", 21), ("top_logprobs", 5), ("logprobs", 5),
        ("logit_bias", {"99999999": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"AI": -100}),
        ("logit_bias", {"1" * 5000: 5}),
        ("logit_bias", {"5": "x"}), ("logit_bias", {"5": 1e9}), ("logit_bias", {"5": True}), ("logit_bias", [1]),
        ("stop", ""), ("stop", 5), ("stop", [1]), ("stop", ["x"] * 1000), ("stop_token_ids", [10**6]),
        ("stop_token_ids", ["a"]), ("stop_token_ids", [1] * 2000), ("stream", "yes"), ("stream", 1),
        ("stream_options", 5), ("messages", []), ("messages", "hi"), ("messages", None), ("model", 5),
        ("response_format", {"type": "yaml"}), ("response_format", "json"), ("tool_choice", "required"),
        ("tool_choice", "sometimes"), ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("guided_json", {"type": "objct"}), ("structured_outputs", {"regex": "("}),
        ("regex", "("), ("best_of", 2), ("custom_logit_processor", "gASV"), ("prompt_logprobs", 99),
        ("functions", [{}]), ("continue_final_message", True), ("chat_template", "{{ 1 }}"),
    ],
)  # fmt: skip
def test_bad_values(server, field, value):
    body = {"messages": HI, field: value}
    for stream in (False, True):
        error = server.refusal(CHAT, body if field == "stream" else body | {"stream": stream})
        assert error["param"].split("[")[0].split(".")[0] == field and error["type"] == "invalid_request_error"
    assert not server.core.requests


@pytest.mark.parametrize(
    "message, param",
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "odd"}]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]},
         "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "content": "a", "partial": True}, "messages[0].partial"),
        (5, "messages[0]"),
    ],
)  # fmt: skip
def test_b016_bad_messages(server, message, param):
    assert server.refusal(CHAT, {"messages": [message]})["param"] == param


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [], "tool_choice": "none"}, "tool_choice"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_bad_objects(server, fields, param):
    assert server.refusal(CHAT, {"messages": HI} | fields)["param"] == param
    if not {"tools", "prompt_logprobs"} & set(fields):
        assert server.refusal("/v1/completions", {"prompt": "a"} | fields)["param"] == param


def test_priority_and_salt_reach_the_engine(server):
    server.chat(priority=-3, cache_salt="tenant a")
    server.complete(priority=7, cache_salt=None)
    chat, completion = (params for _, _, params in server.core.requests[-2:])
    assert (chat.priority, chat.cache_salt) == (-3, "tenant a")
    assert (completion.priority, completion.cache_salt) == (7, None)


def test_values_that_ask_for_nothing_pass(server):
    nothing = {"tools": [], "tool_choice": None, "response_format": {"type": "text"}, "best_of": 1, "regex": None}
    for fields in (nothing, {"functions": []}, {"tool_choice": "none"}, {"user": 5}):
        assert server.chat(**fields)["choices"][0]["finish_reason"], fields


MALFORMED = [
    b"",
    b"{",
    b"nonsense",
    b"[1]",
    b"5",
    b"null",
    b"\xff\xfe{}",
    b'{"messages": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e999}',
    b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"x": ' + b"[" * 100 + b"]" * 100 + b"}",
    b"[" * 100_000,
    b'{"x":' * 100_000,
    b'{"prompt": "\\ud800", "tokens": [1], "messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"\\ud800": 1}',
    b'{"prompt": "a", "extra": {"\\ud800": 1}}',
]


@pytest.mark.parametrize("path", POSTS)
def test_malformed_bodies(server, path):
    with server.http(headers={"content-type": "application/json"}) as http:
        for raw in MALFORMED:
            error_of(http.post(path, content=raw), 400)
        http.headers["content-type"] = "application/json; charset=utf-8"
        assert http.post("/v1/completions", content=b'{"prompt": "\\ud83d\\ude00"}').status_code == 200
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            error = error_of(http.post(path, content=b"{}", headers={"content-type": kind}), 415)
            assert "application/json" in error["message"]
        error_of(http.post(path, content=b"{}", headers={"content-encoding": "gzip"}), 415)


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("GET", "/nope", 404),
        ("POST", "/v1", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", "/health/", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_unknown_routes_and_methods(server, method, path, status):
    with server.http() as http:
        response = http.request(method, path)
    error_of(response, status)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", POSTS)
def test_unknown_model(server, path):
    body = {"model": "gpt-4", "messages": HI, "tokens": [1]}
    if path == "/v1/completions":
        body["prompt"] = "a"
    error = server.refusal(path, body, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_body_limit():
    with serving(max_body_bytes=1000) as server, server.http() as http:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        headers = {"content-type": "application/json"}
        for content in (body, iter([body[:900], body[900:]])):
            assert error_of(http.post("/v1/completions", content=content, headers=headers), 413)["code"]
        server.complete()


def test_api_keys():
    with serving(api_keys=["first", "zweit\u00e9"]) as server, server.http() as http:
        assert error_of(http.get("/v1/models"), 401)["code"] == "invalid_api_key"
        for value in ("Bearer wrong", "Bearer", "first", "Basic first", "Bearer first2", "Bearer \xff"):
            error_of(http.get("/v1/models", headers={"authorization": value.encode("latin-1")}), 401)
        for value in ("Bearer first", "bearer first", "Bearer zweité"):
            assert http.get("/v1/models", headers={"authorization": value.encode()}).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}
        assert server.openai("first").models.list().data


@pytest.mark.parametrize("options", [{"api_keys": [""]}, {"api_keys": ["a", " "]}, {"served_model_names": []}])
def test_senseless_options_are_refused_at_start(server, options):
    from engine.server.app import create_app

    with pytest.raises(ValueError, match=r"API key|served_model_names"):
        create_app(server.client, **{"served_model_names": ["tiny"]} | options)


def test_request_ids_and_the_access_log(server, caplog, request):
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, "turnout")
    logger = logging.getLogger("turnout.access")
    logger.addHandler(caplog.handler)  # the launcher's set-up may have ended propagation
    request.addfinalizer(lambda: logger.removeHandler(caplog.handler))
    with server.http() as http:
        assert http.get("/version", headers={"x-request-id": "trace-42"}).headers["x-request-id"] == "trace-42"
        made = http.get("/nope", headers={"x-request-id": "bad id\x01"}).headers["x-request-id"]
        assert made.startswith("req-")
        http.get("/line%0Abreak")
    server.chat(messages=[{"role": "user", "content": "my secret"}])
    read_stream(server.post(CHAT, {"messages": HI, "stream": True}))
    server.core.wait_for(lambda: not server.core.running)
    lines = [record.getMessage() for record in caplog.records if record.name == "turnout.access"]
    assert any("GET /version 200 ok" in line and line.endswith("trace-42") for line in lines)
    assert any("GET /nope 404 refused" in line and line.endswith(made) for line in lines)
    assert any(f"POST {CHAT} 200 ok" in line for line in lines)
    assert not any("secret" in record.getMessage() or "\n" in record.getMessage() for record in caplog.records)


def test_a_bug_in_the_server_shows_no_internals(server, monkeypatch, caplog, request):
    logger = logging.getLogger("turnout.server")
    logger.addHandler(caplog.handler)
    request.addfinalizer(lambda: logger.removeHandler(caplog.handler))
    monkeypatch.setattr("engine.server.chat.chat_params", lambda *_: 1 / 0)
    error = server.refusal(CHAT, {"messages": HI}, 500)
    assert error["type"] == "server_error"
    assert not any(word in json.dumps(error) for word in ("division", "Traceback", ".py", "ZeroDivision"))
    assert any(record.exc_info for record in caplog.records)


def test_small_routes(server):
    assert server.post("/tokenize", {"prompt": "a<|im_end|>"}).json()["count"] == 2
    chat = server.post("/tokenize", {"messages": HI, "pooling": True}).json()
    assert chat["tokens"] and chat["count"] == len(chat["tokens"]) and chat["max_model_len"] == 256
    assert chat["warnings"]
    tokens = server.post("/tokenize", {"messages": HI, "add_generation_prompt": False}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()
    assert text == {"prompt": "<|im_user|>user<|im_middle|>Hi<|im_end|>"}
    for token in range(server.core.vocab_size):
        if token % 7 == 0:
            assert server.post("/detokenize", {"tokens": [token]}).status_code == 200
    for tokens in ([-1], [server.core.vocab_size], [1.0], [True], "a", None):
        assert server.refusal("/detokenize", {"tokens": tokens})["param"].startswith("tokens")
    assert server.refusal("/tokenize", {"prompt": "a", "messages": HI})["param"] == "prompt"
    assert server.refusal("/tokenize", {})["param"] == "prompt"


def test_the_tokenizer_names_its_tokens_to_tools_that_ask(server):
    """As an evaluation tool does: it finds the names, then their ids one by one, and no special token is added."""
    with server.http() as http:
        info = check(responses.TokenizerInfo, http.get("/tokenizer_info").json())
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("[EOS]", "[BOS]", "[PAD]")
    assert (info["vocab_size"], info["model_max_length"]) == (server.core.vocab_size, 256)
    for name in ("eos_token", "bos_token", "pad_token"):
        answer = server.post("/tokenize", {"prompt": info[name], "add_special_tokens": False}).json()
        assert answer["count"] == 1 and "warnings" not in answer
    both = [server.post("/tokenize", {"prompt": "Hi", "add_special_tokens": value}).json() for value in (True, False)]
    assert both[0] == both[1]


def test_the_openapi_page_tells_the_truth(server):
    with server.http() as http:
        page = http.get("/openapi.json").json()
        assert http.get("/docs").status_code == 200
        html = http.get("/docs").text
    assert all(f"<code>{path}</code>" in html for path in page["paths"]) and "openapi.json" in html
    assert "://" not in html and "<script" not in html, "nothing from other hosts"
    text = json.dumps(page)
    for reference in set(part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]):
        assert reference in page["components"]["schemas"]
    for path in POSTS:
        operation = page["paths"][path]["post"]
        assert operation["requestBody"]["required"]
        assert {"200", "400", "413", "415", "503"} <= set(operation["responses"])
        assert (path in (CHAT, "/v1/completions")) == ({"429", "504"} <= set(operation["responses"]))
    for name in ("ChatCompletionRequest", "CompletionRequest"):
        assert {"priority", "cache_salt"} < set(page["components"]["schemas"][name]["properties"])
    assert '"422"' not in text and "HTTPValidationError" not in text


def test_a_checkpoint_without_template():
    core = make_core()
    core.chat_template = None
    with serving(core) as server:
        assert server.refusal(CHAT, {"messages": HI})["param"] == "messages"
        server.complete()


NAMES = """
    model messages prompt tokens n temperature top_p stop logit_bias stream stream_options tools tool_choice echo
    max_tokens logprobs top_logprobs thinking chat_template_kwargs reasoning_effort response_format role content
    stop_token_ids min_tokens type text function name arguments structured_outputs guided_json guided_choice
    regex grammar json_schema schema strict parameters parallel_tool_calls request_id
"""
KEYS = st.sampled_from(NAMES.split())
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(
    ["user", "assistant", "tool", "text", "function", "auto", "none", "enabled", "f", "\ud800", "{}"]
)
VALUES = st.recursive(
    SCALARS | WORDS | st.just(HI),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5),
    max_leaves=12,
)
BODIES = st.dictionaries(KEYS, VALUES, max_size=6)
STARTS = st.sampled_from([{}, {"messages": HI}, {"prompt": "a"}, {"tokens": [1]}, {"messages": HI, "prompt": "a"}])


def test_random_bodies_never_break_the_server(server):
    with server.http(headers={"content-type": "application/json"}) as http:

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(path=st.sampled_from(POSTS), start=STARTS, fields=BODIES, wins=st.booleans())
        def check(path, start, fields, wins):
            body = {**start, **fields} if wins else {**fields, **start}
            response = http.post(path, content=json.dumps(body).encode())
            assert response.status_code in (200, 400, 404), response.text
            if response.status_code == 200 and body.get("stream") is True:
                assert read_stream(response)[-1] == "[DONE]"
            elif response.status_code != 200:
                error_of(response, response.status_code)

        check()
    assert server.client.is_healthy
