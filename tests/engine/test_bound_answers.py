"""Answers that must match, through whole engines: with guesses as without, and with other requests beside them.

The weights are random, so a model wants none of what it is made to write.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams, StructuredOutputs
from engine.core import EngineCore
from engine.errors import InvalidRequestError
from engine.grammar import Grammars
from engine.grammar.answer import Answer as Answered
from tests.answers import Answer, ask, drain
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.json_checker import matches
from tests.rank_cores import build_core, run_ranks
from tests.scripted_drafts import build, build_real, one_more_each_time, right, says, sometimes, teach, wrong

SHAPE = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "inside": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["city", "size", "inside"],
    "additionalProperties": False,
}
STRICT = {"additionalProperties": False}
NAME = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 3}}, "required": ["name"]} | STRICT
ROOM = {"max_model_len": 320, "max_num_seqs": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("structured") / "model", SMALL)


@pytest.fixture(scope="module")
def plain(checkpoint) -> EngineCore:
    return build(checkpoint, None, **ROOM)


@pytest.fixture(scope="module", params=["eager", "ahead"])
def guessing(request, checkpoint) -> EngineCore:
    return build(checkpoint, 4, request.param == "ahead", **ROOM)


@pytest.fixture(scope="module")
def gate(plain) -> int:
    return plain.tokenizer.think_end_id


def bound(structured: dict, max_tokens: int = 200, **changes) -> SamplingParams:
    """Without the white space that this model is fond of."""
    bias = dict.fromkeys(b" \t\r\n", -50.0) | changes.pop("logit_bias", {})
    changes = {"temperature": 0.0, "max_tokens": max_tokens, "logit_bias": bias} | changes
    return SamplingParams(structured_outputs=StructuredOutputs(**structured), **changes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(17 * i * (seed + 3) + seed) % 290 for i in range(length)]


def facts(answers: list[Answer]) -> list[tuple]:
    return [(a.token_ids, a.text, a.end) for a in answers]


def check(plain: EngineCore, guessing: EngineCore, requests: list, script=sometimes) -> list[Answer]:
    expected = ask(plain, *requests)
    teach(guessing, requests, expected, script)
    found = ask(guessing, *requests)
    assert facts(found) == facts(expected)
    check_allowed(plain, requests, found)
    return found


def check_allowed(core: EngineCore, requests: list, answers: list[Answer]) -> None:
    """Every token but the end's by a matcher that saw nothing else; one that ended by itself is complete."""
    compiler = core.replica.runner.grammars._compiler
    for (_, params), answer in zip(requests, answers, strict=True):
        structured = params.structured_outputs
        if structured is None or structured.begins_at:
            continue
        tokens = answer.token_ids[: -1 if answer.end == ("stop", None) else None]
        if structured.begins_after:
            (gate,) = structured.begins_after
            tokens = tokens[tokens.index(gate) + 1 :] if gate in tokens else []
        matcher = compiler.submit(structured).result().deep_copy()
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        assert matcher.is_accepting() or answer.end != ("stop", None)


MANY = [
    (prompt_of(9), bound({"json": CITY})),
    (prompt_of(5, 1), bound({"json": CITY}, temperature=1.0, seed=3, top_p=0.9)),
    (prompt_of(12, 2), bound({"regex": "([A-Z][a-z]{2,5}-){2,9}[0-9]{3}"}, logprobs=2)),
    (prompt_of(3, 3), bound({"choice": ("positive", "negative", "neutral")}, min_tokens=30, ignore_eos=True)),
    (prompt_of(7, 4), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)),
]


@pytest.mark.parametrize("script", [right, wrong, sometimes, one_more_each_time, says(ord("{"), 1)])
def test_guesses_change_no_bound_answer(plain, guessing, script):
    answers = check(plain, guessing, MANY, script)
    assert all(matches(json.loads(a.text), CITY) for a in answers[:2])
    assert re.fullmatch("([A-Z][a-z]{2,5}-){2,9}[0-9]{3}", answers[2].text) and len(answers[2].logprobs) > 9
    assert answers[3].text in ("positive", "negative", "neutral")
    assert [a.end for a in answers] == [("stop", None)] * 4 + [("length", None)]
    assert script is not right or all(a.metrics.num_accepted_tokens for a in answers)


def test_steps_keep_to_known_tokens_beside_a_bound_answer(checkpoint):
    """A graph replays what the host knows; with the answer gone, steps run ahead again."""
    core = build(checkpoint, None, True, **ROOM)
    core.add_request("bound", prompt_of(4), bound({"choice": ("AAAA",)}))
    core.add_request("free", prompt_of(4, 1), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    depths = {True: set(), False: set()}
    while core.has_unfinished():
        core.step()
        depths[core.replica.scheduler.get("bound") is not None].add(len(core.replica._in_flight))
    assert depths[True] == {0} and 1 in depths[False]
    assert sum(graph.num_replays for graph in core.recorder.graphs) > 10


@pytest.mark.parametrize("at", [0, 1, 3])
def test_b056_the_gate_within_the_guesses_binds_the_rows_behind_it(plain, guessing, gate, at):
    """The guesses behind the gate are none that the schema allows; bias makes the model say the gate."""
    params = bound({"json": NAME, "begins_after": (gate,)}, logit_bias={gate: 100.0})
    free = bound({"json": NAME, "begins_after": (gate,)}, 8)
    requests = [(prompt_of(6), params), (prompt_of(6, 1), params), (prompt_of(8), free)]
    for script in (says(gate, at), lambda token, position, depth: gate if depth < at else token ^ 1):
        answers = check(plain, guessing, requests, script)
        for answer in answers[:2]:
            assert answer.token_ids[0] == gate and matches(json.loads(answer.text.removeprefix("</think>")), NAME)
        assert answers[2].end == ("length", None) and len(answers[2].token_ids) == 8


def test_b057_the_start_of_the_object_comes_once(plain, guessing, gate):
    requests = [
        (prompt_of(6, seed), bound({"json": NAME, "begins_after": (gate,)}, 60, logit_bias={gate: 9.0}, **params))
        for seed in range(5)
        for params in ({"temperature": 1.0, "seed": seed}, {"temperature": 1.0, "seed": seed + 10, "top_k": 40})
    ]
    answers = check(plain, guessing, requests, one_more_each_time)
    complete = [a.text.rpartition("</think>")[2] for a in answers if a.end == ("stop", None)]
    assert len(complete) > 4 and all(matches(json.loads(text), NAME) for text in complete)


def test_b060_penalties_guesses_and_a_grammar_in_one_batch(plain, guessing):
    requests = [
        (prompt_of(6), bound({"json": CITY}, presence_penalty=0.5)),
        (prompt_of(6, 1), SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.3)),
        (prompt_of(6, 2), SamplingParams(temperature=0.0, max_tokens=40)),
    ]
    answers = check(plain, guessing, requests)
    assert matches(json.loads(answers[0].text), CITY)


@pytest.mark.parametrize("changes", [{}, {"ignore_eos": True}, {"min_tokens": 150}])
def test_b062_the_answer_ends_right_behind_the_closing_brace(plain, guessing, changes):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    (answer,) = check(plain, guessing, [(prompt_of(6), bound({"json": schema}, **changes))], right)
    assert json.loads(answer.text) == {"a": "x"} and answer.text.endswith("}") and answer.end == ("stop", None)


def test_b064_a_list_of_nested_models_and_a_recursive_one(plain, guessing):
    item = {"type": "object", "properties": {"n": {"$ref": "#/$defs/Digit"}}, "required": ["n"]} | STRICT
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    items = {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "maxItems": 2}
    tree = {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 2}
    defs = {"$defs": {"Item": item, "Digit": digit, "Tree": tree}}
    requests = [(prompt_of(6), bound({"json": items | defs})), (prompt_of(5), bound({"json": tree | defs}, 60))]
    answers = check(plain, guessing, requests)
    values = json.loads(answers[0].text)
    assert values and all(set(v) == {"n"} and 0 <= v["n"] <= 9 for v in values)
    assert answers[1].end[0] in ("stop", "length") and answers[1].text.startswith("[")


def test_b065_many_bound_answers_through_a_small_engine_with_a_real_draft(tmp_path, checkpoint, plain):
    """32 at once, in small steps."""
    draft = write_draft(tmp_path, SHAPE, seed=9, layer_ids=(0, 1, 2))
    core = build_real(checkpoint, draft, 3, **ROOM, max_num_batched_tokens=24)
    kinds = ({"json_object": True}, {"json": NAME})
    requests = [(prompt_of(20 + i, i), bound(kinds[i % 2], 14, temperature=i % 3 / 2, seed=i)) for i in range(32)]
    answers = ask(core, *requests)
    assert facts(answers) == facts(ask(plain, *requests))
    ended = [(json.loads(a.text), i % 2) for i, a in enumerate(answers) if a.end == ("stop", None)]
    assert len(ended) > 8 and all(isinstance(v, dict) and (not named or matches(v, NAME)) for v, named in ended)
    check_allowed(plain, requests, answers)


def test_a_bound_answer_that_lost_its_place_goes_on_where_it_was(plain, checkpoint):
    core = build(checkpoint, 3, max_model_len=320, max_num_seqs=4)
    requests = [(prompt_of(20 + i, i), bound({"json": CITY})) for i in range(3)]
    expected = ask(plain, *requests)
    teach(core, requests, expected, sometimes)
    for i, request in enumerate(requests):
        core.add_request(f"p{i}", *request)
    answers = {(f"p{i}", 0): Answer() for i in range(3)}
    for step in range(400):
        if not core.has_unfinished():
            break
        if step in (4, 7, 9):
            core.replica.scheduler._preempt(core.replica.scheduler.running[-1])
        for delta in core.step():
            answers[delta.request_id, delta.index].take(delta)
    assert core.stats().num_preemptions == 3
    assert facts(list(answers.values())) == facts(expected)


@pytest.mark.parametrize("at", [1, 2, 7, 9])
def test_an_answer_goes_on_where_it_was_after_an_interrupted_step(plain, guessing, monkeypatch, at):
    """Between a token that its grammar has read and the note of it."""
    request, read, reads = (prompt_of(9), bound({"json": CITY})), Answered._read, []

    def interrupted(answer: Answered, token_id: int) -> None:
        read(answer, token_id)
        reads.append(token_id)
        if len(reads) == at:
            raise KeyboardInterrupt

    (expected,) = ask(plain, request)
    teach(guessing, [request], [expected], right)
    monkeypatch.setattr(Answered, "_read", interrupted)
    for core in (plain, guessing):
        reads.clear()
        core.add_request("one", *request)
        answer, interruptions = Answer(), 0
        while core.has_unfinished():
            try:
                for delta in core.step():
                    answer.take(delta)
            except KeyboardInterrupt:
                interruptions += 1
        assert facts([answer]) == facts([expected]) and interruptions == 1


def test_n_answers_and_stop_strings(plain, guessing):
    """Each of n has its own place in the grammar; a stop string cuts where the caller says."""
    params = bound({"json": NAME}, temperature=1.0, seed=5, n=3)
    texts = []
    for core in (plain, guessing):
        if core is guessing:
            core.drafter.texts = []
        core.add_request("n", prompt_of(8), params)
        texts.append([a.text for _, a in sorted(drain(core).items())])
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert all(matches(json.loads(text), NAME) for text in texts[0])
    (answer,) = check(plain, guessing, [(prompt_of(8), bound({"json": CITY}, stop=['"inside"']))])
    assert answer.end == ("stop", '"inside"') and '"size"' in answer.text and '"inside"' not in answer.text


def test_a_dead_end_is_the_error_of_one_answer_alone(plain, guessing, gate):
    """A gate that the grammar does not begin with; beside it one that is well."""
    dead = bound({"regex": "a", "begins_at": (gate,)}, logit_bias={gate: 100.0})
    for core in (plain, guessing):
        if core is guessing:
            teach(core, [], [], right)
        answers = ask(core, (prompt_of(4), dead), (prompt_of(4), bound({"choice": ("yes",)})))
        reason, why = answers[0].end
        assert reason == "error" and "refuses token" in why and answers[0].token_ids[0] == gate
        assert (answers[1].text, answers[1].end) == ("yes", ("stop", None))
        assert core.stats().num_finished["error"] > 0


EXPLODES = "(([a-z]{1,50}){1,50}){1,50}"


def test_b181_a_pattern_that_meets_a_limit_ends_its_own_answer_alone(plain, guessing):
    """No clock is asked: each engine meets it at the same token."""
    requests = [
        (prompt_of(5), bound({"regex": EXPLODES})),
        (prompt_of(5), bound({"json": {"type": "string", "pattern": f"^{EXPLODES}$"}}, temperature=1.0, seed=1)),
        (prompt_of(4), bound({"choice": ("yes",)})),
    ]
    expected = ask(plain, *requests)
    teach(guessing, requests, expected, right)
    assert facts(ask(guessing, *requests)) == facts(expected)
    for answer in expected[:2]:
        assert answer.end == ("error", "lexer error: too many expressions constructed")
    assert (expected[2].text, expected[2].end) == ("yes", ("stop", None))


def test_b061_a_pattern_that_is_none_is_refused_and_the_engine_goes_on(plain):
    for structured in ({"json": {"type": "string", "pattern": "["}}, {"regex": "("}, {"grammar": "junk ("}):
        with pytest.raises(InvalidRequestError) as caught:
            plain.add_request("bad", [1, 2], bound(structured))
        assert caught.value.param == "structured_outputs" and not plain.has_unfinished()
        with pytest.raises(InvalidRequestError):
            plain.check_structured_outputs(StructuredOutputs(**structured))
    assert ask(plain, ([1, 2], bound({"choice": ("yes",)})))[0].text == "yes"


values = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["a", 1, None, 'q"\\é']}]),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b}, st.integers(-50, 50), st.integers(0, 99)
    ),
)


def objects(inner):
    fields = st.dictionaries(st.text('ab "é', min_size=1, max_size=3), inner, max_size=3)
    return st.builds(
        lambda f, n: {"type": "object", "properties": f, "required": list(f)[:n], "additionalProperties": False},
        fields,
        st.integers(0, 3),
    )


schemas = st.recursive(
    values,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda one, n: {"type": "array", "items": one, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 2**31), temperature=st.sampled_from([0.0, 1.0, 2.0]))
def test_every_answer_that_ends_by_itself_matches_its_schema(plain, guessing, schema, seed, temperature):
    params = bound({"json": schema}, 80, temperature=temperature, seed=seed, logit_bias={ord('"'): 3.0, ord("}"): 3.0})
    for answer in check(plain, guessing, [(prompt_of(3, seed % 50), params)]):
        assert answer.end[0] == "length" or matches(json.loads(answer.text), schema), answer.text


def _on_rank(rank: int, directory: str, tp: int) -> list:
    from engine.config import EngineConfig

    config = EngineConfig(directory, device="cpu", dtype="float32", num_threads=1, max_model_len=320, tp=tp)
    return [(a.token_ids, a.text) for a in ask(build_core(config, rank), *MANY)]


def test_two_ranks_choose_the_tokens_of_one(tmp_path, checkpoint, plain):
    expected = [(a.token_ids, a.text) for a in ask(plain, *MANY)]
    assert run_ranks(2, tmp_path, _on_rank, str(checkpoint), 2) == [expected] * 2


def test_the_library_is_loaded_by_the_first_answer_that_needs_it():
    code = "import sys, engine.grammar, engine.server.app; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
    assert Grammars.__module__ == "engine.grammar.grammars"


def test_chat_and_generate_of_the_trained_model():
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["n"],
    }
    structured = StructuredOutputs(json=schema | {"additionalProperties": False})
    params = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=structured)
    with LLM(device="cpu", num_threads=1, max_model_len=512) as llm:
        (raw,) = llm.generate("The answer as JSON: ", params)
        assert set(json.loads(raw.outputs[0].text)) == {"n"} and raw.outputs[0].finish_reason == "stop"
        question = [{"role": "user", "content": "What is 12 + 30?"}]
        for thinking in (False, True):
            (chat,) = llm.chat(question, params, chat_template_kwargs={"thinking": thinking})
            reasoning, _, content = chat.outputs[0].text.rpartition("</think>")
            assert bool(reasoning) is thinking and matches(json.loads(content), schema)
