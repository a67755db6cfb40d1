"""What is refused before it is compiled."""

import json

import pytest

from engine.grammar import bounds


def chain(length: int, last: str = '"x"') -> str:
    return "start: a0\n" + "\n".join(f'a{i}: "b" a{i + 1} | "c"' for i in range(length)) + f"\na{length}: {last}\n"


def wide(keys: int) -> dict:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(keys)}}


def typed(keys: int, **keywords) -> dict:
    return {"type": "object", "properties": {f"k{i}": keywords for i in range(keys)}}


def keyed(patterns: int) -> dict:
    return {"type": "object", "patternProperties": {f"^k{i}": {} for i in range(patterns)}}


def blocks(count: int) -> str:
    """Each within bounds."""
    return "start: a\n" + "".join(f"a{i}: %json {json.dumps(wide(1000))}\n" for i in range(count))


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


def all_of(count: int) -> str:
    return json.dumps({"allOf": [{"pattern": f"x{i}"} for i in range(count)]})


def referring(count: int) -> str:
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f"x{i}"} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {}}})


def any_in_any(count: int) -> str:
    schema = {}
    for i in range(count):
        schema = {"pattern": f"x{i}", "anyOf": [schema]}
    return json.dumps(schema)


def patterned(count: int) -> str:
    """So many that need not hold together."""
    return json.dumps({"properties": {f"k{i}": {"pattern": f"x{i}"} for i in range(count)}, "anyOf": [{}, {}]})


@pytest.mark.parametrize(
    ("check", "good", "bad", "words"),
    [
        (bounds.check_json, json.dumps(wide(1000)), json.dumps(wide(1001)), "1001 keys"),
        (bounds.check_json, nested(90), nested(101), "deeper than 100"),
        (bounds.check_json, "{}", "[" * 200_000, "deeper than 100"),
        (bounds.check_json, "{}", "{'a': 1}", "no JSON"),
        (bounds.check_json, "{}", f'{{"title": "{"x" * bounds.MAX_TEXT}"}}', "characters"),
        (
            bounds.check_json,
            json.dumps(typed(460, format="uri")),
            json.dumps(typed(500, format="uri")),
            "units of size",
        ),
        (
            bounds.check_json,
            json.dumps(typed(460, minimum=3)),
            json.dumps(typed(900, pattern="^[a-z]{1,20}$")),
            "units",
        ),
        (bounds.check_json, '{"multipleOf": 9999}', '{"multipleOf": 99991}', "units of size"),
        (bounds.check_json, '{"multipleOf": 0.01}', '{"multipleOf": NaN}', "units of size"),
        (bounds.check_json, json.dumps(keyed(150)), json.dumps(keyed(190)), "units of size"),
        (bounds.check_json, json.dumps([wide(100)] * 30), json.dumps([wide(100)] * 40), "units of size"),
        (
            bounds.check_json,
            json.dumps(typed(400, pattern="a*b?c+")),
            json.dumps(typed(400, pattern="a*" * 6)),
            "repet",
        ),
        (bounds.check_regex, "a?" * 2000, "a?" * 2001, "2001 repetitions"),
        (bounds.check_regex, r"\?\+" * 2001 + "a{1000000}", "(a*b{2})" * 1001, "2002 repetitions"),
        (
            bounds.check_lark,
            'start: X\nX: "a?+*"?' + ' "a"+' * 1999,
            'start: X\nX: "a"?' + ' "a"+' * 2000,
            "repetitions",
        ),
        (bounds.check_lark, "start: /a*/ // " + "?" * 3000, "start: /" + "a*" * 2001 + "/", "2001 repetitions"),
        (bounds.check_lark, blocks(1), blocks(2), "units of size"),
        (bounds.check_lark, chain(197), chain(200), "rules that refer"),
        (bounds.check_lark, 'start: "a"' + ' | "a"' * 4000, 'start: "a"' + ' | "a"' * 4001, "alternatives"),
        (bounds.check_lark, "start: " + "\n" * 3000, "start: " + "\n" * 4001, "lines"),
        (bounds.check_lark, f"start: %json {json.dumps(wide(9))}", f"start: %json {json.dumps(wide(1001))}", "keys"),
        (bounds.check_lark, 'start: %json {"a": 1} "x"', 'start: %json {"a": 1', "cannot be read"),
        (bounds.check_lark, "start: /x\\/\\n/", "start: /x\ny: /", "end on the line"),
        (bounds.check_json, all_of(8), all_of(9), "9 patterns"),
        (bounds.check_json, referring(8), referring(9), "9 patterns"),
        (bounds.check_json, patterned(9), any_in_any(9), "9 patterns"),
        (bounds.check_lark, "start: A\nA: /x/" + " & ~/y/" * 4, "start: A\nA: /x/" + " & ~/y/" * 5, "operators"),
        (bounds.check_lark, 'start: "&~&~&~&~&~"', f"start: %json {all_of(9)}", "9 patterns"),
    ],
)
def test_the_largest_is_taken_and_what_is_larger_is_refused(check, good, bad, words):
    check(good)
    with pytest.raises(bounds.Refusal, match=words):
        check(bad)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ('start: "a"', 1),
        ("start: b\nb: c\nc: /x/", 3),
        ('start: "b" "c"\nb: c\nc: /b c/ // b', 2),
        ("start: b\nb: c | d\nc: b\nd: /x/", 4),
        ("start: b c\nb[lazy]: /x/\n?c: b\n  | b b", 3),
    ],
)
def test_depth_counts_references_and_all_rules_of_a_cycle(text, depth):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MAX_RULE_DEPTH", depth)
        bounds.check_lark(text)
        patch.setattr(bounds, "MAX_RULE_DEPTH", depth - 1)
        with pytest.raises(bounds.Refusal, match=f"has {depth} rules"):
            bounds.check_lark(text)
