"""One answer against a fresh matcher, guesses or not, and what becomes of it where nothing is allowed."""

from __future__ import annotations

import gc
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine.grammar.compiler
from engine.errors import InvalidRequestError
from engine.grammar import GrammarCompiler, Grammars
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs
from engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer.synthetic(600)
COMPILER = GrammarCompiler(TOKENIZER)
GRAMMARS = Grammars(TOKENIZER, 640)  # a model with 40 tokens that the tokenizer has not
EOS, STOP, GATE = TOKENIZER.eos_id, TOKENIZER.im_end_id, TOKENIZER.think_end_id
SECTION = TOKENIZER.tool_section_begin_id
ENDS = {EOS, STOP}
BOUND = (
    {"json_object": True},
    {"json": {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 4}},
    {"regex": "[a-c]{2,9}(0|11)?"},
    {"choice": ("yes", "no", "yes, but", "")},
    {"grammar": f"start: <[{SECTION}]> call+ <[{TOKENIZER.tool_section_end_id}]>\ncall: /[a-z]+/ <[{GATE}]>\n"},
)


def request_of(structured: dict, ends=ENDS, **changes) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputs(**structured), max_tokens=99, **changes)
    return Request("a", [1], params, 0, 99, frozenset(ends))


def rows_of(request: Request, guesses: list[int], width: int | None = None, grammars: Grammars = GRAMMARS) -> list[set]:
    """Tokens that each row allows."""
    width = width or len(guesses) + 1
    rows, masks = grammars.masks([request], [guesses], width)
    if not len(rows):
        return [set(range(640))] * width
    assert rows.tolist() == list(range(width))
    return [set(np.unpackbits(mask.view(np.uint8), bitorder="little")[:640].nonzero()[0].tolist()) for mask in masks]


def expected(structured: dict, tokens: list[int], ends=frozenset(ENDS)) -> set[int]:
    """By a matcher of its own."""
    matcher = COMPILER.submit(StructuredOutputs(**structured)).result().deep_copy()
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())
    return allowed - {600} | (set(ends) if 600 in allowed else set())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(structured=st.sampled_from(BOUND), seed=st.integers(0, 10**6), gated=st.booleans())
def test_rows_are_those_of_a_fresh_matcher_whatever_was_guessed(structured, seed, gated):
    """Guesses that fit, that do not, that end; the answer goes on as if there had been none."""
    rng = random.Random(seed)
    request = request_of(structured | ({"begins_after": (GATE,)} if gated else {}))
    tokens: list[int] = []
    if gated:
        request.output_token_ids += [7, SECTION]
        assert rows_of(request, [9, GATE])[2] == expected(structured, [])
        assert rows_of(request, [9, 9])[2] == set(range(640)) - ENDS
        request.output_token_ids.append(GATE)
    for _ in range(12):
        guesses, wanted = [], [expected(structured, tokens)]
        for _ in range(rng.randrange(5)):
            guesses.append(rng.choice(sorted(wanted[-1])) if rng.random() < 0.8 else rng.randrange(640))
            if guesses[-1] in ENDS or guesses[-1] not in wanted[-1]:
                break
            wanted.append(expected(structured, tokens + guesses))
        assert rows_of(request, guesses)[: len(wanted)] == wanted
        token = rng.choice(sorted(wanted[0]))
        if token in ENDS:
            break
        tokens.append(token)
        request.output_token_ids.append(token)
    assert GRAMMARS.failure(request) is None or wanted[0] != ENDS


def test_rows_beyond_the_guesses_are_like_the_last():
    request = request_of({"regex": "AB?C"})
    a, b, c = b"ABC"
    assert rows_of(request, [a, b], 5) == [{a}, {b, c}, {c}, {c}, {c}]
    assert rows_of(request, [b, a], 3) == [{a}, {a}, {a}], "no row matters behind a guess that is refused"


def test_a_section_may_open_out_of_the_reasoning_and_is_read_itself():
    request = request_of(BOUND[4] | {"begins_after": (GATE,), "begins_at": (SECTION,)})
    letters = set(range(ord("a"), ord("z") + 1))
    assert rows_of(request, [5, SECTION])[2] & letters == letters
    assert rows_of(request, [5, GATE])[2] == {SECTION}
    only_at = request_of(BOUND[4] | {"begins_at": (SECTION,)})
    assert rows_of(only_at, [5, 6]) == [set(range(640))] * 3, "it may end without a section"
    assert rows_of(only_at, [5, SECTION, 97])[3] & letters == letters


def test_b062_nothing_but_the_end_is_left_behind_the_last_token():
    """Whatever else the request wants; where it may go on, it does."""
    a, b = b"AB"
    for changes in ({}, {"ignore_eos": True}, {"min_tokens": 50}):
        request = request_of({"regex": "AB?"}, **changes)
        assert rows_of(request, [a, b])[2] == ENDS
        assert rows_of(request, [a, b])[1] == ({b} if changes else {b} | ENDS)
    own = request_of({"regex": "AB?"}, {*ENDS, 20}, ignore_eos=True, stop_token_ids=[20])
    assert rows_of(own, [a, b])[1:] == [{b, 20}, {20}]


def test_min_tokens_keeps_stop_tokens_out_that_the_grammar_allows():
    a, b = b"AB"
    own = {"ends": {*ENDS, a}, "stop_token_ids": [a], "min_tokens": 2}
    assert rows_of(request_of({"regex": "[AB]{4}"}, **own), [b, b]) == [{b}, {b}, {a, b}]
    assert rows_of(request_of({"regex": "A[AB]"}, **own), []) == [{a}], "unless nothing else is left"


def test_as_many_optional_properties_as_are_allowed_can_be_followed():
    names = [f"k{i}" for i in range(1000)]
    request = request_of({"json": {"type": "object", "properties": {name: {"type": "null"} for name in names}}})
    for token in b'{"k999":null,"k':
        assert token in rows_of(request, [])[0]
        request.output_token_ids.append(token)
    assert GRAMMARS._answer(request).failure is None


def test_an_answer_that_must_match_does_not_end_before_it_begins():
    every = set(range(640))
    assert rows_of(request_of({"regex": "a", "begins_after": (GATE,)}), [3]) == [every - ENDS] * 2
    may = {"regex": "a", "begins_at": (GATE,)}
    assert rows_of(request_of(may), [3]) == [every] * 2
    assert rows_of(request_of(may, ignore_eos=True), [3]) == [every - ENDS] * 2
    assert rows_of(request_of(may, min_tokens=1), [3]) == [every - ENDS, every]


def test_a_dead_end_leaves_the_end_alone_and_a_reason():
    """A refused token, such as one behind `begins_at` that the grammar does not begin with."""
    request = request_of({"regex": "ab", "begins_at": (GATE,)})
    assert rows_of(request, [GATE])[1] == ENDS
    request.output_token_ids += [GATE, EOS]
    assert "refuses token" in GRAMMARS.failure(request)
    assert GRAMMARS.failure(request) is None, "it is forgotten"
    well = request_of({"regex": "ab"})
    well.output_token_ids += [97]
    rows_of(well, [98])
    well.output_token_ids += [98, EOS]
    assert GRAMMARS.failure(well) is None


def test_a_limit_met_behind_a_guess_costs_the_answer_nothing():
    """The matcher has no way back out of an error, so another takes its place."""
    request = request_of({"regex": "(0|1)*0(0|1){9}2"})
    assert rows_of(request, [48]) == [{48, 49}] * 2
    answer = GRAMMARS._answer(request)
    real = answer._matcher
    request.output_token_ids.append(49)
    calls = []

    def broken(*_) -> None:
        calls.append(real.try_consume_tokens([0]))

    answer._matcher = SimpleNamespace(
        try_consume_tokens=real.try_consume_tokens,
        unsafe_compute_mask_ptr=lambda *a: calls.append(a) or real.unsafe_compute_mask_ptr(*a),
        is_error=lambda: len(calls) > 1,
        get_error=lambda: "a limit",
    )
    assert rows_of(request, [48, 48]) == [{48, 49}] * 3
    assert answer.failure is None and answer._matcher is not real
    assert rows_of(request, [48, 48]) == [{48, 49}] * 3


def test_a_limit_that_another_answer_has_used_up_ends_no_answer():
    """Copies of a matcher share a lexer: one that grew too large is useless to all of them at once."""
    structured = {"regex": "(([a-z]{1,50}){1,50}){1,50}"}
    alone, first, second, late = (request_of(structured) for _ in range(4))
    letters = [ord("a") + i % 26 for i in range(60)]

    def tokens_until_a_limit(request: Request, grammars: Grammars, most: int = 60) -> int:
        while len(request.output_token_ids) < most and rows_of(request, [], grammars=grammars)[0] != ENDS:
            request.output_token_ids.append(letters[len(request.output_token_ids)])
        return len(request.output_token_ids)

    expected = tokens_until_a_limit(alone, Grammars(TOKENIZER, 640))
    assert 10 < expected < 60
    assert tokens_until_a_limit(first, GRAMMARS, 8) == tokens_until_a_limit(second, GRAMMARS, 8) == 8
    for request in (first, second, late):
        assert tokens_until_a_limit(request, GRAMMARS) >= expected
        request.output_token_ids.append(EOS)
        assert "too many" in GRAMMARS.failure(request)


def test_failures_of_compilation_end_the_answer_alone():
    request = request_of({"regex": "("})
    assert rows_of(request, []) == [ENDS]
    request.output_token_ids.append(EOS)
    assert "unclosed group" in GRAMMARS.failure(request)


REFUSED = {
    "b061 pattern": ({"json": {"type": "string", "pattern": "["}}, "unclosed character class"),
    "b061 regex": ({"regex": "("}, "unclosed group"),
    "b061 grammar": ({"grammar": "junk {{{"}, "Expected token"),
    "b064 endless reference": (
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "nothing matches",
    ),
    "b181 repetitions": ({"regex": "(" * 9000 + "a" + ")" * 9000}, "characters"),
    "b181 counts": ({"regex": "a{1000000}"}, "too many expressions"),
    "b181 options": ({"regex": "(a?){500}a{500}"}, "too many expressions"),
    "b181 doubled": ({"regex": "(" * 60 + "a" + "){2}" * 60}, "too many expressions"),
    "unsatisfiable": ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    "unknown keyword": ({"json": {"not": {}}}, "not"),
    "no schema": ({"json": "[]"}, "is an object"),
    "no JSON": ({"json": "{"}, "no JSON"),
    "remote": ({"json": {"$ref": "http://localhost/x"}}, "does not fetch"),
    "surrogate": ({"regex": "\ud800"}, "surrogate"),
    "no text": ({"regex": 5}, "as text"),
    "choices": ({"choice": tuple(map(str, range(10_001)))}, "more than the 10000 allowed"),
    "used up by its lexer": ({"regex": "(a{1000}){1000}"}, "too many expressions"),
    "no choices": ({"choice": ()}, "at least one"),
    "too many choices": ({"choice": tuple(map(str, range(10_001)))}, "10001 texts"),
    "long": ({"grammar": "x" * 300_000}, "characters"),
    "wide": ({"json": {"properties": {f"p{i}": {} for i in range(1001)}}}, "1001 keys"),
    "no token": ({"grammar": "start: <[9999]>"}, "too large"),
    "endless rule": ({"grammar": "start: start"}, "nothing matches"),
    "gate": ({"regex": "a", "begins_after": (9999,)}, "9999"),
}


@pytest.mark.parametrize(("structured", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_refused_in_one_line(structured, words):
    for _ in range(2):  # the second time from what is kept
        with pytest.raises(InvalidRequestError, match=words) as caught:
            GRAMMARS.check(StructuredOutputs(**structured))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 450
        assert words == "surrogate" or caught.value.param == "structured_outputs"


def test_a_refusal_that_is_kept_holds_no_one_to_whom_it_was_told():
    """A client may send the same wrong schema again and again."""

    def told() -> tuple[weakref.ref, int]:
        body = Tokenizer.synthetic(600)  # stands for what a caller's frame holds
        with pytest.raises(InvalidRequestError) as caught:
            GRAMMARS.check(StructuredOutputs(regex="["))
        return weakref.ref(body), len(caught.traceback)

    first, last = told(), told()
    gc.collect()
    assert first[0]() is last[0]() is None and first[1] == last[1]


def test_b064_references_are_followed_and_recursion_ends():
    tree = {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "required": ["c"]}
    structured = {"json": {"$ref": "#/$defs/t", "$defs": {"t": tree | {"additionalProperties": False}}}}
    assert expected(structured, TOKENIZER.encode('{"c": [{"c": []}, {"c": [{"c": []}]}]}')) == ENDS


@pytest.mark.parametrize("closed", [{"additionalProperties": False}, {}])
def test_the_widest_object_that_is_taken_can_be_written(closed):
    """Each key that may be left out takes places in the parser's row behind the opening brace."""
    keys = [f"k{i}" for i in range(engine.grammar.bounds.MAX_KEYS)]
    wide = {"type": "object", "properties": {key: {"enum": [1]} for key in keys}} | closed
    text = f'{{"{keys[0]}": 1, "{keys[500]}": 1, "{keys[-1]}": 1}}'
    assert expected({"json": wide}, TOKENIZER.encode(text)) == ENDS


@pytest.mark.parametrize("pattern", ["(A+)+$", "(A|A)*$", "(A|B)*A(A|B){25}", "^([A-Z]+)*$"])
def test_b181_patterns_that_explode_elsewhere_are_linear_here(pattern):
    request = request_of({"regex": pattern})
    for count, token in enumerate(TOKENIZER.encode("A" * 300)):
        allowed = rows_of(request, [])[0]
        assert token in allowed, f"after {count}"
        request.output_token_ids.append(token)
    assert rows_of(request, [])[0] >= ENDS and ord("!") not in rows_of(request, [])[0]


def test_rules_nested_as_deep_as_allowed_leave_the_stack_whole():
    depth = 150
    definitions = {f"n{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/n{i + 1}"}}} for i in range(999)}
    definitions["n999"] = {"type": "integer"}
    GRAMMARS.check(StructuredOutputs(json={"$ref": "#/$defs/n0", "$defs": definitions}))
    rules = "\n".join(f'a{i}: "b" a{i + 1} | "c"' for i in range(depth))
    assert expected({"grammar": f'start: a0\n{rules}\na{depth}: "x"'}, [98] * depth) == {ord("x")}


def test_a_check_shares_nothing_with_steps():
    """Rank 0 alone checks; what it moved would count towards limits that other ranks do not meet."""
    compiler = GrammarCompiler(TOKENIZER)
    compiler.check(StructuredOutputs(regex="a+"))
    assert len(compiler._checked) == 1 and not compiler._done
    matcher = compiler.submit(StructuredOutputs(regex="a+")).result()
    assert compiler.submit(StructuredOutputs(regex="a+")).result() is matcher
    compiler.begin_step()
    new = compiler.renew(StructuredOutputs(regex="a+"), [97])
    assert new.is_accepting() and not matcher.is_accepting()
    assert compiler.submit(StructuredOutputs(regex="a+")).result() is not matcher


def test_a_step_renews_each_grammar_once_and_only_so_much(monkeypatch):
    """Answers of one grammar meet the limits of the lexer that they share together; compiling it anew and reading all
    tokens again for each of them would hold up everybody's step."""
    monkeypatch.setattr(engine.grammar.compiler, "MAX_REPLAYED", 100)
    compiler = GrammarCompiler(TOKENIZER)
    compiled = []
    monkeypatch.setattr(
        compiler, "_compile", lambda *key: compiled.append(key) or type(compiler)._compile(compiler, *key)
    )
    grammars = [StructuredOutputs(regex=regex) for regex in ("a+", "b+", "c+")]
    for _ in range(2):  # each step has all of it
        compiler.begin_step()
        compiled.clear()
        found = [compiler.renew(grammars[0], [97] * 40), compiler.renew(grammars[0], [97] * 40)]
        assert all(matcher.is_accepting() for matcher in found) and len(compiled) == 1
        assert compiler.renew(grammars[1], [98]).is_accepting()
        assert compiler.renew(grammars[2], [99]) is None, "a third grammar waits for no one"
        assert compiler.renew(grammars[0], [97] * 20) is None, "more than 100 tokens"


def test_compiled_grammars_are_kept_and_the_oldest_forgotten(monkeypatch):
    monkeypatch.setattr(engine.grammar.compiler, "MAX_COMPILED", 3)
    compiler = GrammarCompiler(TOKENIZER)
    one = [compiler.submit(StructuredOutputs(regex=f"a{i}")) for i in range(4)]
    assert compiler.submit(StructuredOutputs(regex="a3")) is one[3]
    assert compiler.submit(StructuredOutputs(regex="a1")) is one[1]
    assert compiler.submit(StructuredOutputs(regex="a0")) is not one[0]
    assert compiler.submit(StructuredOutputs(regex="a1")) is one[1] and len(compiler._done) == 3
