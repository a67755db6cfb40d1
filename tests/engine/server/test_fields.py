"""Fields of requests and answers: ids, fingerprint, notes to the provider, and reports of values to refuse."""

import pytest

from tests.engine.server.harness import HI, emit, make_core, serving, texts

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def test_the_client_may_name_its_answer(server):
    for answer in (server.chat(request_id="my:id-1"), server.chat(request_id="my:id-1")):
        assert answer["id"] == "chatcmpl-my:id-1"
    assert server.complete(request_id="a.b")["id"] == "cmpl-a.b"
    assert {chunk["id"] for chunk in server.chat_chunks(request_id="x")} == {"chatcmpl-x"}
    engine_ids = [request_id for request_id, _, _ in server.core.requests]
    assert len(set(engine_ids)) == len(engine_ids) == 4
    for bad in ("", "a b", "x" * 129, "a\n", 5):
        assert server.refusal(CHAT, {"messages": HI, "request_id": bad})["param"] == "request_id"


def test_the_fingerprint_is_that_of_build_and_settings(server):
    own = server.chat()["system_fingerprint"]
    assert own.startswith("fp_") and server.complete()["system_fingerprint"] == own
    chunks = server.chat_chunks(stream_options={"include_usage": True}) + server.completion_chunks()
    assert {chunk["system_fingerprint"] for chunk in chunks} == {own}
    with serving(make_core(config="another")) as other:
        assert other.chat()["system_fingerprint"] != own


@pytest.mark.parametrize(
    "fields, warned",
    [
        ({"metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto", "safety_identifier": "s",
          "prompt_cache_key": "k", "modalities": ["text"], "best_of": 1, "function_call": None}, []),
        ({"service_tier": "default", "store": None, "audio": None, "verbosity": None}, []),
        ({"store": True, "service_tier": "flex", "verbosity": "low", "temprature": 1},
         ["service_tier", "store", "temprature", "verbosity"]),
        ({"extra_body": {"top_k": 1}}, ["extra_body"]),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_told_unless_nothing_is_lost(server, fields, warned):
    for answer in (server.chat(**fields), server.complete(**fields)):
        assert sorted(warning.split()[0] for warning in answer.get("warnings", ())) == warned


ROWS = [
    *(("b074", "logit_bias", value) for value in ({"99999999": 5}, {"-1": 5})),
    *(("b075", "logit_bias", value) for value in ({"AI": -100}, {"5": "x"}, {"5": 1e9}, {"5": True}, {"٣": 1})),
    *(("b077", name, value) for name, value in (("stop", ["x"] * 1000), ("stop_token_ids", [1] * 2000))),
    *(("b084", "temperature", value) for value in (-0.1, 3, "hot")),
    *(("b084", "top_p", value) for value in (0, 1.5)),
    *(("b084", name, value) for name, value in (("n", 0), ("presence_penalty", 9), ("max_tokens", -1))),
    ("b095", "stop", ""), ("b095", "stop", ["a", ""]), ("b095", "stop", [5]),
]  # fmt: skip


@pytest.mark.parametrize("row, field, value", ROWS)
def test_b074_b075_b077_b084_b095_bad_values_name_their_field(server, row, field, value):
    for path, body in ((CHAT, {"messages": HI}), (COMPLETION, {"prompt": "a"})):
        for stream in (False, True):
            error = server.refusal(path, body | {field: value, "stream": stream})
            assert error["param"].split(".")[0] == field and error["type"] == "invalid_request_error", row
    assert not server.core.requests and server.chat()["choices"]


def test_b075_not_a_number_is_not_json(server):
    raw = b'{"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"5": NaN}}'
    with server.http(headers={"content-type": "application/json"}) as http:
        response = http.post(CHAT, content=raw)
    assert response.status_code == 400 and "NaN" in response.json()["error"]["message"]


@pytest.mark.parametrize("fields, param", [({"max_tokens": 0}, "max_tokens"), ({"top_logprobs": 21}, "top_logprobs"),
                                           ({"top_logprobs": 5}, "top_logprobs"),
                                           ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
                                           ({"max_completion_tokens": 0}, "max_completion_tokens")])  # fmt: skip
def test_b084_limits_of_chats_alone(server, fields, param):
    error = server.refusal(CHAT, {"messages": HI} | fields)
    assert error["param"] == param and not server.core.requests


def test_b095_the_earliest_stop_wins_and_none_is_none(server):
    stop = ["漢字", "字x", "ab", "abc"]
    for text, kept in (("1漢字x", "1"), ("1字x", "1"), ("1abc", "1"), ("1漢", "1漢"), ("1a", "1a")):
        server.core.default_script = emit(f"</think>{text}")
        assert server.chat(stop=stop)["choices"][0]["message"]["content"] == kept
        assert texts(server.chat_chunks(stop=stop))["content"] == kept
    server.core.default_script = emit("</think>1abc")
    for stop, kept in ((None, "1abc"), ([], "1abc"), ("bc", "1a")):
        assert server.chat(stop=stop)["choices"][0]["message"]["content"] == kept


def test_b100_usage_comes_when_it_is_asked_for(server):
    for events in (server.chat_chunks, server.completion_chunks):
        last = events(stream_options={"include_usage": True})[-1]
        assert last["choices"] == [] and last["usage"]["total_tokens"] > 0
        assert all(not chunk.get("usage") for chunk in events(stream_options={"include_usage": False}))
        running = events(stream_options={"continuous_usage_stats": True})
        counts = [chunk["usage"]["completion_tokens"] for chunk in running]
        assert counts == sorted(counts) and counts[-1] > 1 and running[-1]["choices"]
    for path, body in ((CHAT, {"messages": HI}), (COMPLETION, {"prompt": "a"})):
        error = server.refusal(path, body | {"stream_options": {"include_usage": True}})
        assert error["param"] == "stream_options"


def test_reasoning_may_be_left_out(server):
    shown, hidden = (server.chat(include_reasoning=value) for value in (True, False))
    assert shown["choices"][0]["message"]["reasoning_content"] == "thoughts" and shown["usage"] == hidden["usage"]
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "answer", "refusal": None}
    assert texts(server.chat_chunks(include_reasoning=False, logprobs=True)) == {
        "role": "assistant",
        "content": "answer",
    }
