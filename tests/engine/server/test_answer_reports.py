"""What users of other servers reported about structured output, logprobs, seeds, limits and counts, over the bundled
checkpoint with its draft; where a row compares, also without.

What the model would rather say is another matter: it is tiny, and all this holds whatever it prefers.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.config import EngineConfig
from engine.launch import start_engine
from tests.engine.server.harness import serving, texts

OFF = {"thinking": {"type": "disabled"}}
COUNTING = [{"role": "user", "content": "Count from one to ten."}]
SHORT = {"type": "string", "maxLength": 8}
CITY = {"type": "object", "properties": {"city": SHORT}, "required": ["city"], "additionalProperties": False}
ASK = [{"role": "user", "content": "What is the weather in Oslo? Answer in JSON."}]
GREEDY = {"messages": ASK, "temperature": 0, "max_tokens": 100}


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": CITY} | more}


def start(draft):
    config = EngineConfig(device="cpu", num_threads=1, max_model_len=1024, draft=draft, kv_cache_memory_gb=0.1)
    return start_engine(config)[0]


@pytest.fixture(scope="module")
def guessing():
    with serving(start("auto")) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with serving(start(None)) as server:
        yield server


def answer(server, **fields):
    """(message, finish_reason, usage), the same streamed and not."""
    fields = GREEDY | fields
    whole = server.chat(**fields)
    chunks = server.chat_chunks(**fields, stream_options={"include_usage": True})
    message, joined = whole["choices"][0]["message"], {"content": "", "reasoning_content": "", "arguments": ""}
    for chunk in chunks[:-1]:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            joined[name] += delta.get(name) or ""
        joined["arguments"] += "".join(c["function"].get("arguments", "") for c in delta.get("tool_calls", ()))
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning_content"] == (message.get("reasoning_content") or "")
    assert joined["arguments"] == "".join(c["function"]["arguments"] for c in message.get("tool_calls") or ())
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    return message, whole["choices"][0]["finish_reason"], whole["usage"]


@pytest.mark.parametrize("switch", [{}, OFF])
def test_b056_b057_b058_a_schema_holds_with_thinking_and_guesses(guessing, plain, switch):
    message, reason, usage = answer(guessing, **schema(CITY), **switch)
    assert message == plain.chat(**GREEDY | schema(CITY) | switch)["choices"][0]["message"] and reason == "stop"
    assert list(json.loads(message["content"])) == ["city"] and message["content"].count('"city"') == 1
    assert bool(message.get("reasoning_content")) == (not switch)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_b057_drawn_answers_hold_too(guessing):
    def ask(seed):
        fields = GREEDY | {"temperature": 1, "seed": seed, "max_tokens": 200} | schema(CITY)
        choice = guessing.chat(**fields)["choices"][0]
        return choice["finish_reason"], choice["message"]["content"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(6)))
    finished = [content for reason, content in answers if reason == "stop"]
    assert len(finished) > 2 and all(list(json.loads(content)) == ["city"] for content in finished)


def test_b060_penalties_guesses_and_a_grammar_in_one_batch(guessing):
    requests = [schema(CITY) | {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {}]
    with ThreadPoolExecutor(3) as pool:
        bound, *free = pool.map(lambda fields: guessing.chat(**GREEDY | OFF | fields), requests)
    assert list(json.loads(bound["choices"][0]["message"]["content"])) == ["city"]
    assert all(one["choices"][0]["finish_reason"] in ("stop", "length") for one in free)


@pytest.mark.parametrize(
    "fields, param",
    [(schema({"type": "string", "pattern": "["}), "response_format.json_schema.schema"), ({"regex": "("}, "regex"),
     ({"ebnf": "junk"}, "ebnf"), ({"grammar": "start: missing"}, "grammar")],
)  # fmt: skip
def test_b061_what_cannot_be_compiled_is_refused(guessing, fields, param):
    assert guessing.refusal("/v1/chat/completions", GREEDY | fields)["param"] == param
    assert guessing.refusal("/v1/completions", {"prompt": "a"} | fields)["param"] == param
    assert guessing.complete(max_tokens=1)["choices"]


def test_b062_nothing_follows_a_finished_answer(guessing):
    only = {"type": "object", "properties": {"a": {"enum": ["one"]}}, "required": ["a"], "additionalProperties": False}
    for fields in ({}, {"ignore_eos": True, "min_tokens": 150}):
        message, reason, usage = answer(guessing, **schema(only), **OFF, **fields, max_tokens=200)
        assert json.loads(message["content"]) == {"a": "one"} and message["content"].endswith("}")
        assert reason == "stop" and usage["completion_tokens"] < 60


def test_b064_references_are_followed(guessing):
    node = {"type": "object", "properties": {"v": {"enum": [1, 2]}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["v"], "additionalProperties": False}  # fmt: skip
    nested = {"$defs": {"Node": node}, "type": "array", "items": {"$ref": "#/$defs/Node"}, "minItems": 1, "maxItems": 2}
    ends = {str(guessing.core.tokenizer.encode(text)[0]): 100 for text in ("}", "]", "}]")}
    choice = guessing.chat(**GREEDY | schema(nested) | OFF | {"logit_bias": ends, "max_tokens": 60})["choices"][0]
    found = json.loads(choice["message"]["content"])
    assert choice["finish_reason"] == "stop" and found and all(item["v"] in (1, 2) for item in found)


def test_b065_32_at_once(guessing):
    def ask(i):
        wish = {"response_format": {"type": "json_object"}}
        fields = {"messages": [{"role": "user", "content": f"Write {i} in JSON."}], "max_tokens": 20, "temperature": 0}
        return guessing.chat(**fields | wish | OFF)["choices"][0]

    with ThreadPoolExecutor(32) as pool:
        choices = list(pool.map(ask, range(32)))
    for choice in choices:
        content = choice["message"]["content"]
        assert content.lstrip().startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(content), dict)
    assert sum(choice["finish_reason"] == "stop" for choice in choices) > 2 and guessing.client.is_healthy


def test_b066_any_object_and_a_schema(guessing):
    both, _, _ = answer(guessing, response_format={"type": "json_object"}, guided_json=CITY, **OFF)
    assert list(json.loads(both["content"])) == ["city"]
    alone, reason, _ = answer(guessing, response_format={"type": "json_object"}, **OFF)
    assert alone["content"].lstrip().startswith("{") and (
        reason == "length" or json.loads(alone["content"]) is not None
    )


@pytest.mark.parametrize(
    "fields, fits",
    [({"regex": "[0-9]{3}-[a-c]+"}, lambda text: text[:3].isdigit() and text[3] == "-"),
     ({"guided_choice": ["north", "south"]}, lambda text: text in ("north", "south")),
     ({"ebnf": 'root ::= ("ab" | "cd"){2}'}, lambda text: text in ("abab", "abcd", "cdab", "cdcd")),
     ({"grammar": 'start: "x" y\ny: /[0-9]{2}/'}, lambda text: text[0] == "x" and text[1:].isdigit())],
)  # fmt: skip
def test_other_kinds_in_both_endpoints(guessing, fields, fits):
    message, _, _ = answer(guessing, **fields, **OFF)
    assert fits(message["content"])
    choice = guessing.complete(prompt="Answer: ", temperature=0, max_tokens=60, n=2, **fields)["choices"][1]
    assert fits(choice["text"]) and choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    "choice, switch", [("required", {}), ("required", OFF), ({"type": "function", "function": {"name": "b.c:d"}}, OFF)]
)
def test_b048_a_call_that_must_be_made_is_made(guessing, plain, choice, switch):
    fields = {"tools": [tool("a"), tool("b.c:d")], "tool_choice": choice, "parallel_tool_calls": False} | switch
    message, reason, _ = answer(guessing, **fields)
    if choice == "required":
        assert message == plain.chat(**GREEDY | fields)["choices"][0]["message"]
    assert reason == "tool_calls" and not message["content"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in (("a", "b.c:d") if choice == "required" else ("b.c:d",))
    assert list(json.loads(call["function"]["arguments"])) == ["city"]
    assert call["id"] == f"functions.{call['function']['name']}:0"
    assert bool(message.get("reasoning_content")) == (not switch)


def test_an_object_or_a_call(guessing):
    message, reason, _ = answer(guessing, tools=[tool("a", strict=True)], **schema(CITY), **OFF)
    spoken = message["content"] or message["tool_calls"][0]["function"]["arguments"]
    assert list(json.loads(spoken)) == ["city"] and reason in ("stop", "tool_calls")


def test_logprobs_and_stop_strings_of_a_bound_answer(guessing, plain):
    fields = GREEDY | schema(CITY) | OFF | {"logprobs": True, "top_logprobs": 2}
    found, expected = (server.chat(**fields)["choices"][0] for server in (guessing, plain))
    entries = found["logprobs"]["content"]
    assert [e["token"] for e in entries] == [e["token"] for e in expected["logprobs"]["content"]] and entries
    message, reason, _ = answer(guessing, **schema(CITY), **OFF, stop=[":"])
    assert reason == "stop" and message["content"].rstrip().endswith('"city"')
    assert texts(guessing.chat_chunks(**GREEDY | schema(CITY) | OFF | {"stop": [":"]}))["content"] == message["content"]


def entries(server, **fields):
    answer = server.chat(
        messages=COUNTING, temperature=0, max_tokens=24, **OFF, logprobs=True, return_token_ids=True, **fields
    )
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
    return choice["token_ids"], choice["logprobs"]["content"]


@pytest.mark.parametrize("top", [{"top_logprobs": 0}, {"top_logprobs": None}, {}])
def test_b069_no_alternatives(guessing, top):
    _, scores = entries(guessing, **top)
    assert all(entry["top_logprobs"] == [] and entry["bytes"] for entry in scores)


def test_b070_b071_logprobs_are_those_of_plain_decoding(guessing, plain):
    (ids, found), (expected_ids, expected) = (entries(server, top_logprobs=5) for server in (guessing, plain))
    assert ids == expected_ids and any(entry["logprob"] < 0 for entry in found)
    for entry, other in zip(found, expected, strict=True):
        assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-2)
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
    assert len({tuple(top["token"] for top in entry["top_logprobs"]) for entry in found}) > 1


def test_b072_alternatives_of_one_text_stay_apart(guessing):
    _, scores = entries(guessing, top_logprobs=20)
    for entry in scores:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        assert all(isinstance(top["bytes"], list) and top["bytes"] for top in entry["top_logprobs"])


def test_b073_a_seed_gives_one_text_alone_and_under_load(guessing):
    def ask(seed):
        fields = {"temperature": 1, "max_tokens": 8, "seed": seed, "ignore_eos": True}
        return guessing.chat(messages=COUNTING, **fields, return_token_ids=True)["choices"][0]["token_ids"]

    alone = [ask(7), ask(7)]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(ask, seed) for seed in (11, 12, 13, 14, 15, 16)]
        loaded = [pool.submit(ask, 7), pool.submit(ask, 7)]
        assert {tuple(future.result()) for future in loaded} == {tuple(ids) for ids in alone}
        assert len({tuple(future.result()) for future in others}) > 1
    assert ask(8) != alone[0]


def test_b083_greedy_answers_do_not_vary(guessing):
    """Ten times alone, then among others that ask something else."""
    other = [[{"role": "user", "content": f"Tell me {'more ' * i}about the number {i}."}] for i in range(8)]

    def ask(messages):
        answer = guessing.chat(messages=messages, temperature=0, max_tokens=12, return_token_ids=True)
        return tuple(answer["choices"][0]["token_ids"])

    alone = {ask(COUNTING) for _ in range(10)}
    assert len(alone) == 1
    others = [ask(messages) for messages in other]
    with ThreadPoolExecutor(6) as pool:
        company = [pool.submit(ask, messages) for pair in zip(other, [COUNTING] * 8, strict=True) for messages in pair]
        answers = [future.result() for future in company]
    assert set(answers[1::2]) == alone and answers[::2] == others


def test_b074_b077_many_biased_tokens_work_and_unknown_ones_are_refused(guessing):
    size = guessing.client.vocab_size
    bias = {str(token): -100 for token in range(min(size, 2000))}
    answer = guessing.chat(logit_bias=bias, stop_token_ids=list(range(500)), max_tokens=4)
    assert answer["usage"]["completion_tokens"] >= 1
    error = guessing.refusal("/v1/completions", {"prompt": "a", "logit_bias": {str(size): 1}})
    assert error["param"] == "logit_bias" and guessing.complete(max_tokens=1)["choices"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_b078_scoring_a_prompt_with_speculation(guessing, plain, max_tokens):
    fields = {"prompt": "The cat sat on the mat.", "echo": True, "max_tokens": max_tokens, "logprobs": 1}
    found, expected = (server.complete(**fields, temperature=0)["choices"][0] for server in (guessing, plain))
    scores, others = found["logprobs"], expected["logprobs"]
    assert scores["tokens"] == others["tokens"] and scores["text_offset"] == others["text_offset"]
    assert scores["token_logprobs"][1:] == pytest.approx(others["token_logprobs"][1:], abs=1e-4)
    assert set(scores) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 7}, {"stop": ["o"]}, {}])
def test_b099_counts_are_those_of_the_ids_in_every_mode(guessing, plain, fields):
    asked = {"messages": COUNTING, "temperature": 0, "max_tokens": 30, "return_token_ids": True} | OFF | fields
    whole, other = guessing.chat(**asked), plain.chat(**asked)
    chunks = guessing.chat_chunks(**asked, stream_options={"include_usage": True})
    usage = whole["usage"]
    assert usage["completion_tokens"] == len(whole["choices"][0]["token_ids"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert texts(chunks).get("content", "") == (whole["choices"][0]["message"]["content"] or "")
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == other["usage"][key] == chunks[-1]["usage"][key]


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "reasoning_content": "need a tool", "content": None, "tool_calls": [
        {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}]},
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "4 C"},
]  # fmt: skip


@pytest.mark.parametrize("messages, tools", [(COUNTING, None), (TURNS[:2], [TOOL]), (TURNS, [TOOL]), (TURNS[:2], None)])
@pytest.mark.parametrize("switch", [{}, OFF])
def test_b103_prompt_tokens_are_those_of_the_template(guessing, messages, tools, switch):
    usage = guessing.chat(messages=messages, tools=tools, max_tokens=1, **switch)["usage"]
    rendered = guessing.core.chat_template.render(messages, tools, **({"thinking": False} if switch else {}))
    expected = guessing.core.tokenizer.encode(rendered, allow_special=True)
    assert usage["prompt_tokens"] == len(expected)
    tokens = guessing.post("/tokenize", {"messages": messages, "tools": tools} | switch).json()["tokens"]
    assert tokens == expected
