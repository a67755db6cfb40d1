"""Text completions: prompt forms, choice numbers, echo, the older logprobs."""

from dataclasses import replace

import openai
import pytest

from tests.engine.server.harness import emit, tokenizer


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("Hi", ["Hi"]),
        (["Hi", "yo"], ["Hi", "yo"]),
        ([72, 105], ["Hi"]),
        ([[72, 105], [121]], ["Hi", "y"]),
        ("a<|im_end|>", ["a<|im_end|>"]),
    ],
)
def test_prompt_forms_and_choice_numbers(server, prompt, prompts):
    server.core.scripts.extend(emit(f"out{i}") for i in range(2 * len(prompts)))
    answer = server.complete(prompt=prompt, n=2)
    sent = [ids for _, ids, _ in server.core.requests]
    assert sent == [emit(text) for text in prompts]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, f"out{i}") for i in range(2 * len(prompts))]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))
    server.core.scripts.extend(emit(f"out{i}") for i in range(2 * len(prompts)))
    chunks = server.completion_chunks(prompt=prompt, n=2, stream_options={"include_usage": True})
    for choice in answer["choices"]:
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"] == answer["usage"] and chunks[-1]["choices"] == []


def test_guesses_of_all_answers_are_reported(server):
    server.core.num_draft_tokens, server.core.num_accepted_tokens = 7, 7
    answer = server.complete(prompt=["a", "b"], n=2)
    details = answer["usage"]["completion_tokens_details"]
    assert details == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 28,
        "rejected_prediction_tokens": 0,
    }
    chunks = server.completion_chunks(prompt=["a", "b"], n=2, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == answer["usage"]


def test_default_budget_and_the_context(server):
    server.core.default_script = emit("x" * 300)
    answer = server.complete()
    assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["finish_reason"] == "length"
    answer = server.complete(prompt=[65] * 250, max_tokens=1000)
    assert answer["usage"]["completion_tokens"] == 6 and answer["choices"][0]["finish_reason"] == "length"
    for stream in (False, True):
        error = server.refusal("/v1/completions", {"prompt": [65] * 256, "stream": stream})
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert error["message"].count("256") == 2


def test_one_refused_prompt_ends_them_all(server):
    error = server.refusal("/v1/completions", {"prompt": [[65], [99999]], "max_tokens": 4})
    assert error["param"] == "prompt"
    server.core.wait_for(lambda: not server.core.running)


@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo(server, logprobs, max_tokens):
    """What lm-eval sends: echo with logprobs and a budget of 0 or 1."""
    prompt = "Hé<|im_end|>"
    ids = emit(prompt)
    server.core.default_script = emit("ab")
    fields = {"prompt": prompt, "echo": True, "max_tokens": max_tokens, "logprobs": logprobs}
    answer = server.complete(**fields)
    choice, generated = answer["choices"][0], [*emit("ab"), tokenizer().im_end_id][:max_tokens]
    assert choice["text"] == prompt + "ab"[:max_tokens]
    assert answer["usage"]["completion_tokens"] == len(generated)
    assert choice["finish_reason"] == ("stop" if max_tokens == 3 else "length")
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        scores = choice["logprobs"]
        assert {len(column) for column in scores.values()} == {len(ids) + len(generated)}
        assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
        assert scores["token_logprobs"][1:] == [0.0] * (len(ids) + len(generated) - 1)
        for token, top in zip(scores["tokens"][1:], scores["top_logprobs"][1:], strict=True):
            assert len(top) == max(logprobs, 1) and max(top, key=top.get) == token
        assert scores["text_offset"][:3] == [0, 1, 2] and scores["tokens"][0] == "H"
        assert scores["text_offset"][len(ids) :] == [len(prompt), len(prompt) + 1, len(prompt) + 2][:max_tokens]
    chunks = server.completion_chunks(**fields)
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]
    if logprobs is not None:
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert {key: [x for part in parts for x in part[key]] for key in parts[0]} == choice["logprobs"]


def test_choices_may_come_before_the_scores_of_their_prompt(server, monkeypatch):
    advance, fields = server.core._advance, {"echo": True, "logprobs": 1, "n": 2, "max_tokens": 2}

    def late(sequence):
        scores, delta = sequence.prompt_logprobs, advance(sequence)
        sequence.prompt_logprobs = scores if sequence.num_tokens < 2 else None
        last = sequence.index == 1 and delta.finish_reason
        return replace(delta, prompt_logprobs=scores if last else None)

    expected = server.complete(**fields)["choices"]
    monkeypatch.setattr(server.core, "_advance", late)
    assert server.complete(**fields)["choices"] == expected


def test_logprobs_of_half_characters_keep_apart(server):
    server.core.default_script = list("é".encode())
    scores = server.complete(logprobs=20)["choices"][0]["logprobs"]
    assert scores["tokens"][0] == "bytes:\\xc3" and scores["text_offset"] == [0, 0, 1]
    assert all(len(top) == 20 for top in scores["top_logprobs"])
    assert min(scores["top_logprobs"][0].values()) == -9999.0


def test_prompt_logprobs_and_token_ids(server):
    choice = server.complete(prompt="Hi!", prompt_logprobs=2, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == emit("Hi!") and choice["token_ids"][-1] == tokenizer().im_end_id
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "105": {"logprob": 0.0, "rank": 1, "decoded_token": "i"},
        "106": {"logprob": -0.5, "rank": 2, "decoded_token": "j"},
    }


def test_b085_b093_stop_strings_and_text_in_any_cut(server):
    server.core.default_script = emit("The quick brown fox 汉字😀")
    for cut in (1, 2, 50):
        server.core.tokens_per_step = cut
        for fields, text in (({"stop": ["own fox"]}, "The quick br"), ({}, "The quick brown fox 汉字😀")):
            fields |= {"max_tokens": 100}
            assert server.complete(**fields)["choices"][0]["text"] == text
            chunks = server.completion_chunks(**fields)
            assert "".join(c["choices"][0]["text"] for c in chunks) == text
            assert not any("\ufffd" in c["choices"][0]["text"] for c in chunks)


def test_openai_client(server):
    client = server.openai()
    server.core.default_script = emit("hello")
    assert client.completions.create(model="tiny", prompt="x").choices[0].text == "hello"
    stream = client.completions.create(model="tiny", prompt=["x", "y"], stream=True, max_tokens=2)
    pieces = [(chunk.choices[0].index, chunk.choices[0].text) for chunk in stream]
    assert ["".join(text for i, text in pieces if i == index) for index in (0, 1)] == ["hel", "hel"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "prompt_embeds": "abc"}, "prompt_embeds"),
        ({"prompt": ["a"] * 200, "n": 100}, "prompt"),
        ({}, "prompt"),
    ],
)
def test_refusals(server, fields, param):
    assert server.refusal("/v1/completions", fields)["param"] == param


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_has_the_ids_that_the_whole_answer_has(server, echo):
    fields = {"prompt": ["Hi", "yo!"], "n": 2, "echo": echo, "return_token_ids": True}
    whole = server.complete(**fields)
    chunks = server.completion_chunks(**fields)
    for choice in whole["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [c["prompt_token_ids"] for c in own if "prompt_token_ids" in c] == [choice["prompt_token_ids"]]
        assert own[0]["prompt_token_ids"] == emit(fields["prompt"][choice["index"] // 2])
        assert [token for c in own for token in c["token_ids"]] == choice["token_ids"]
