"""Chat completions end to end: the split, the stream's form, counts, stops, logprobs, switches."""

import asyncio

import openai
import pytest

from tests.engine.server.harness import HI, RunningServer, both, emit, texts, tokenizer

NO_THINKING = {"chat_template_kwargs": {"thinking": False}}


@pytest.mark.parametrize(
    "script, reasoning, content",
    [
        ("abc</think>answer", "abc", "answer"),
        ("<think>x</think>y", "x", "y"),
        ("a<think>b</think>c</think>d<think>e", "ab", "cde"),
        ("</think>only", None, "only"),
        ("never closed", "never closed", None),
        ("", None, None),
        ("é汉字😀</think>😀é", "é汉字😀", "😀é"),
        (
            "look<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
            "look",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
        ),
    ],
)
def test_b017_b019_reasoning_is_split_at_the_marker_id(server, script, reasoning, content):
    message, reason, usage = both(server, script)
    assert (message["reasoning_content"], message["content"], reason) == (reasoning, content, "stop")
    assert usage["completion_tokens"] == len(emit(script)) + 1


def test_markers_spelled_in_ordinary_tokens_are_text(server):
    spelled = tokenizer().encode("a</think>b")
    message, _, _ = both(server, [*spelled, *emit("</think>"), *spelled])
    assert (message["reasoning_content"], message["content"]) == ("a</think>b", "a</think>b")


def test_half_a_character_before_the_marker_does_not_move_the_cut(server):
    broken = list("é".encode())[:1]
    message, _, _ = both(server, [*emit("ab"), *broken, *emit("</think>c"), *broken])
    assert (message["reasoning_content"], message["content"]) == ("ab\ufffd", "c\ufffd")


def test_b020_thinking_off_gives_content_alone(server):
    for script in ("42", "no </think> split"):
        message, _, usage = both(server, script, **NO_THINKING)
        assert message["content"] == script and "reasoning_content" not in message
        assert set(usage["completion_tokens_details"].values()) == {0}
    message, _, _ = both(server, "", **NO_THINKING)
    assert message["content"] == ""


def test_b022_cut_inside_the_reasoning(server):
    message, reason, usage = both(server, "x" * 50, max_tokens=8)
    assert (message["reasoning_content"], message["content"], reason) == ("x" * 8, None, "length")
    assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 8


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_budget(server, name):
    _, reason, usage = both(server, "a</think>" + "b" * 50, **{name: 7})
    assert (reason, usage["completion_tokens"]) == ("length", 7)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7


def test_max_completion_tokens_wins_and_null_is_absent(server):
    server.chat(max_tokens=5, max_completion_tokens=3, temperature=None, n=None, stop=None, stream=None, tools=None)
    params = server.core.requests[-1][2]
    assert (params.max_tokens, params.temperature, params.stop) == (3, 1.0, [])


def test_the_budget_is_cut_to_the_context(server):
    prompt = server.post("/tokenize", {"messages": HI}).json()["count"]
    for fields in ({}, {"max_tokens": 1000}, {"max_tokens": 1000, "min_tokens": 900}):
        server.chat(**fields)
        params = server.core.requests[-1][2]
        assert params.max_tokens == server.core.max_model_len - prompt
        assert params.min_tokens <= params.max_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context(server, stream):
    body = {"messages": [{"role": "user", "content": "x" * 300}], "stream": stream}
    error = server.refusal("/v1/chat/completions", body)
    count = server.post("/tokenize", body).json()["count"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(count) in error["message"] and "256" in error["message"]
    assert "Error" not in error["message"] and "/" not in error["message"]


@pytest.mark.parametrize("where, start", [("content", "t</think>"), ("reasoning_content", "")])
def test_b092_b093_stop_strings_over_token_borders(server, where, start):
    message, reason, usage = both(server, start + "The quick brown fox", stop=["own fox", "zzz"])
    assert (message[where], reason) == ("The quick br", "stop")
    assert usage["completion_tokens"] == len(emit(start + "The quick brown fox"))


@pytest.mark.parametrize(
    ("script", "stop", "text", "matched"),
    [
        ("alpha beta gamma delta", "beta gamma", "alpha ", "beta gamma"),
        ("x漢字", ["漢字", "字x", "ab", "abc"], "x", "漢字"),
        ("漢 字x", ["漢字", "字x", "ab", "abc"], "漢 ", "字x"),
        ("xabc", ["漢字", "字x", "ab", "abc"], "x", "ab"),
        ("xa漢", ["漢字", "字x", "ab", "abc"], "xa漢", None),
        ("hello", None, "hello", None),
    ],
)
def test_b094_b095_the_earliest_stop_wins(server, script, stop, text, matched):
    """In any cut, and `usage` counts up to the token that completes it."""
    message, reason, usage = both(server, "t</think>" + script, stop=stop)
    assert (message["content"], reason) == (text, "stop")
    assert server.chat(stop=stop)["choices"][0]["stop_reason"] == matched
    counted = "t</think>" + (script[: script.index(matched) + len(matched)] if matched else script)
    assert usage["completion_tokens"] == len(emit(counted)) + (matched is None)


@pytest.mark.parametrize("text", ["👍🏽", "汉字かな", "e\u0301a\u0308", "👨‍👩‍👧"])
def test_b085_characters_come_whole(server, text):
    ids = [*text.encode(), *emit("</think>"), *text.encode()]  # a token a byte
    message, _, _ = both(server, ids)
    assert (message["reasoning_content"], message["content"]) == (text, text)
    chunks = server.chat_chunks()
    assert not any("\ufffd" in value for c in chunks for value in c["choices"][0]["delta"].values())


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_b088_a_character_that_the_budget_cuts_is_one_replacement_mark(server, num_bytes):
    ids = [*emit("</think>a"), *"😀".encode()]
    message, reason, _ = both(server, ids, max_tokens=2 + num_bytes)
    assert (message["content"], reason) == ("a\ufffd", "length")
    entries = server.chat(max_tokens=2 + num_bytes, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries[2:]] == [[byte] for byte in "😀".encode()[:num_bytes]]


def test_b013_a_call_of_the_history_without_its_reasoning(server):
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop = [{"role": "tool", "tool_call_id": "functions.f:0", "content": "done"}]
    for reasoning, written in (({}, ""), ({"reasoning_content": None}, ""), ({"reasoning_content": "why"}, "why")):
        server.chat(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [call], **reasoning}, *loop])
        text = tokenizer().decode(server.core.requests[-1][1], skip_special_tokens=False)
        assert f"<think>{written}</think><|tool_calls_section_begin|>" in text


def test_stop_string_next_to_the_marker(server):
    message, _, _ = both(server, "abc</think>answer", stop="</think>")
    assert (message["reasoning_content"], message["content"]) == ("abc", None)
    message, _, _ = both(server, "abc</think>answer", stop=["think>ans"], include_stop_str_in_output=True)
    assert (message["reasoning_content"], message["content"]) == ("abc", "ans")
    message, _, _ = both(server, "hi</think>ho", stop=["zzz"])
    assert (message["reasoning_content"], message["content"]) == ("hi", "ho")


def test_stop_token_id_is_the_stop_reason(server):
    server.core.default_script = emit("a</think>bXc")
    choice = server.chat(stop_token_ids=[ord("X")])["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("b", ord("X"))


def test_logprobs(server):
    server.core.default_script = [*emit("a</think>"), *"😀".encode()]
    for count in (0, 1, 5, 20):
        choice = server.chat(logprobs=True, top_logprobs=count)["choices"][0]
        entries = choice["logprobs"]["content"]
        assert len(entries) == 2 + 4 + 1
        for entry in entries:
            assert len(entry["top_logprobs"]) == count
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert count == 0 or entry["top_logprobs"][0]["bytes"] == entry["bytes"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries[2:6]) == "😀".encode()
        chunks = server.chat_chunks(logprobs=True, top_logprobs=count)
        streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
        assert streamed == entries
    assert server.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert server.chat(logprobs=False, top_logprobs=None)["choices"][0]["logprobs"] is None


def test_b090_several_choices_in_one_stream(server):
    server.core.scripts.extend([emit("r0</think>zero"), emit("r1</think>one"), emit("r2</think>two")])
    chunks = server.chat_chunks(n=3, logprobs=True, stream_options={"include_usage": True})
    assert [texts(chunks, i)["content"] for i in range(3)] == ["zero", "one", "two"]
    assert chunks[-1]["choices"] == [] and all(len(c["choices"]) == 1 for c in chunks[:-1])
    assert all(c["usage"] is None for c in chunks[:-1])
    for index in range(3):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
    server.core.scripts.extend([emit("r0</think>zero"), emit("r1</think>one"), emit("r2</think>two")])
    whole = server.chat(n=3)
    assert [c["message"]["content"] for c in whole["choices"]] == ["zero", "one", "two"]
    assert whole["usage"] == chunks[-1]["usage"]


def test_b091_usage_in_the_stream_only_when_asked(server):
    for fields in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in server.chat_chunks(**fields))
    running = server.chat_chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running]
    assert counts == sorted(counts) and counts[-1] == len(server.core.default_script) + 1
    assert server.refusal("/v1/chat/completions", {"messages": HI, "stream_options": {}})["param"] == "stream_options"


def test_cached_tokens_are_reported_also_when_zero(server):
    assert server.chat()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    server.core.num_cached_tokens = 4
    assert server.chat(n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_guesses_are_reported_also_when_there_are_none(server):
    """Of all answers together, streamed or not; those accepted are completion tokens as well."""
    details = server.chat()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0
    server.core.num_draft_tokens, server.core.num_accepted_tokens = 9, 5
    for n in (1, 2):
        usage = server.chat(n=n)["usage"]
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 5 * n and details["rejected_prediction_tokens"] == 4 * n
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        chunks = server.chat_chunks(n=n, stream_options={"include_usage": True})
        assert chunks[-1]["usage"] == usage
    answer = server.openai().chat.completions.create(model="tiny", messages=HI)
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 4


def tail(server: RunningServer) -> str:
    text = tokenizer().decode(server.core.requests[-1][1], skip_special_tokens=False)
    return text.rsplit("<|im_middle|>", 1)[1]


@pytest.mark.parametrize(
    "fields, off",
    [
        ({}, False),
        ({"chat_template_kwargs": {"thinking": True}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"thinking": {"type": "enabled"}}, False),
        ({"enable_thinking": False}, True),
        ({"reasoning_effort": "none"}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": True}}, False),
    ],
)
def test_b015_every_spelling_of_the_thinking_switch(server, fields, off):
    server.core.default_script = emit("a</think>b")
    message = server.chat(**fields)["choices"][0]["message"]
    assert tail(server) == ("<think></think>" if off else "<think>")
    assert message["content"] == ("a</think>b" if off else "b")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"chat_template_kwargs": {"nope": 1}}, "chat_template_kwargs.nope"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
        ({"thinking": {"type": "off"}}, "thinking"),
        ({"thinking": {"type": "enabled", "keep": "all"}}, "thinking"),
        ({"thinking": {}}, "thinking"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "reasoning_effort"),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, "enable_thinking"),
    ],
)
def test_unknown_or_contradictory_switches(server, fields, param):
    assert server.refusal("/v1/chat/completions", {"messages": HI} | fields)["param"] == param


def test_b011_b014_b016_messages_reach_the_template(server):
    tools = [{"type": "function", "function": {"name": "mcp.files.read", "parameters": {"type": "object"}}}]
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    echoed = dict.fromkeys(("refusal", "audio", "function_call", "content")) | {"annotations": []}
    messages = [
        {"role": "developer", "content": "Reply BANANA"},
        {"role": "user", "content": [{"type": "text", "text": "a😀"}, {"type": "text", "text": "b<|im_end|>"}]},
        {"role": "assistant", "tool_calls": [call], "reasoning": "why", "reasoning_content": "why"} | echoed,
        {"role": "tool", "tool_call_id": "functions.f:0", "name": "f", "content": "done"},
    ]
    for choice in (None, "auto", "none"):
        server.chat(messages=messages, tools=tools, tool_choice=choice)
        ids = server.core.requests[-1][1]
        text = tokenizer().decode(ids, skip_special_tokens=False)
        for part in ("system<|im_middle|>Reply BANANA", "a😀b<|im_end|>", "<think>why</think>", "mcp.files.read"):
            assert part in text
        assert ids.count(tokenizer().im_end_id) == 5  # the tools and four messages, not the one that the user typed
        assert "## Return of functions.f:0\ndone" in text


def test_b017_ignored_fields_are_listed(server):
    fields = {"extra_body": {"a": 1}, "temprature": 0.5, "metadata": {"a": "b"}, "user": "me", "store": None}
    answer = server.chat(**fields)
    assert [w.split()[0] for w in answer["warnings"]] == ["extra_body", "temprature"]
    assert answer["choices"][0]["message"]["reasoning_content"] == "thoughts"
    first, *rest = server.chat_chunks(**fields)
    assert first["warnings"] == answer["warnings"] and not any("warnings" in chunk for chunk in rest)
    assert "warnings" not in server.chat()


def test_defaults_come_from_the_checkpoint(server):
    server.client.generation_defaults = {"temperature": 0.6, "top_p": 0.95}
    try:
        server.chat(top_p=0.5)
        params = server.core.requests[-1][2]
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 0)
    finally:
        server.client.generation_defaults = {}


def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "n": 2, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": -100}, "stop": ["x", "y"],
        "stop_token_ids": [1], "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2,
        "max_tokens": 4, "prompt_logprobs": 1, "skip_special_tokens": False,
    }  # fmt: skip
    answer = server.chat(**fields, logprobs=True, top_logprobs=2, return_token_ids=True)
    given = server.core.requests[-1][2].to_dict()
    assert given == given | fields | {"logit_bias": {5: -100.0}, "logprobs": 2}
    prompt = server.core.requests[-1][1]
    assert answer["prompt_token_ids"] == prompt and len(answer["prompt_logprobs"]) == len(prompt)
    assert answer["choices"][0]["token_ids"] == server.core.default_script[:4]


def test_openai_client(server):
    client = server.openai()
    answer = client.chat.completions.create(model="kimi", messages=HI)
    assert (answer.choices[0].message.content, answer.model) == ("answer", "kimi")
    assert answer.choices[0].message.reasoning_content == "thoughts"
    stream = client.chat.completions.create(model="tiny", messages=HI, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "answer"
    assert answer._request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=HI)
    assert [model.id for model in client.models.list()] == ["tiny", "kimi"]
    assert client.models.retrieve("kimi").max_model_len == 256


def test_parallel_answers_are_not_mixed_up(server):
    """Each request echoes its own code word: the script is chosen by the prompt."""
    core = server.core
    original = core.add_request

    def scripted(request_id, prompt, params):
        word = tokenizer().decode(prompt).split("code ")[1].split(" ")[0]
        core.scripts.append(emit(f"r</think>{word}"))
        original(request_id, prompt, params)

    async def ask(client, i):
        messages = [{"role": "user", "content": f"code {i:04d} please"}]
        if i % 2:
            answer = await client.chat.completions.create(model="tiny", messages=messages)
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    core.add_request = scripted
    try:
        assert asyncio.run(ask_all()) == [f"{i:04d}" for i in range(32)]
    finally:
        core.add_request = original
