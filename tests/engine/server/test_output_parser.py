"""The parser against a plain reading of the whole answer, for any ids, any cut, any lag of the text, any early end."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.call_headers import MAX_HEADER, called_function
from engine.server.output_parser import CallDelta, OutputParser, TextDelta
from engine.server.tool_rules import ToolRules
from engine.tokenizer import IncrementalDecoder
from tests.engine.server.harness import emit, tokenizer
from tests.engine.server.markup import AB, CB, CE, MARKERS, SB, SE, call, section

TOKENIZER = tokenizer()
THINK, END_THINK = emit("<think>")[0], emit("</think>")[0]
MARKER_IDS = {emit(text)[0]: text for text in MARKERS}
TOOLS = ToolRules(("a", "b", "ab.c"), "auto", first_number=3)
NO_TOOLS = ToolRules()


@dataclass
class Answer:
    """What an answer amounts to."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments
    errors: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    num_reasoning_tokens: int = 0

    def take(self, deltas: list) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text
                setattr(self, delta.channel, getattr(self, delta.channel) + delta.text)
            elif isinstance(delta, CallDelta):
                assert delta.index == len(self.calls), "indexes are dense from 0"
                self.calls.append([delta.id, delta.name, ""])
            else:
                assert delta.index == len(self.calls) - 1 and delta.text
                self.calls[-1][2] += delta.text


@dataclass
class Case:
    """An answer's ids, where its text ends, and why it ended."""

    ids: list[int]
    text: str
    rules: ToolRules = TOOLS
    prompt: tuple[int, ...] = (THINK,)
    splits: bool = True
    skip: bool = True
    end: tuple[str, str | int | None] = ("stop", None)

    def parser(self) -> OutputParser:
        return OutputParser(TOKENIZER, list(self.prompt), self.rules, self.splits, self.skip)


def case_of(script: str, **more) -> Case:
    ids = emit(script)
    return Case(ids, TOKENIZER.decode(ids), **more)


def parse(case: Case, steps: list[tuple[int, int]]) -> Answer:
    """Reads the answer in steps of so many ids, the text so many characters behind what they decode to."""
    parser, answer, decoder = case.parser(), Answer(), IncrementalDecoder(TOKENIZER, case.skip)
    sent = position = available = 0
    for count, lag in cycle(steps):
        new, sent = case.ids[sent : sent + count], sent + count
        available += len(decoder.push(new))
        upto = max(position, min(len(case.text), available - lag))
        answer.take(parser.push(new, case.text[position:upto]))
        position = upto
        if sent >= len(case.ids):
            break
    answer.take(parser.push([], case.text[position:]))
    rest, answer.finish_reason = parser.finish(*case.end)
    answer.take(rest)
    answer.errors, answer.num_reasoning_tokens = parser.errors, parser.num_reasoning_tokens
    return answer


AT_ONCE = [(10**9, 0)]
ONE_BY_ONE = [(1, 0)]
PLACES = dict(zip(MARKERS, "\ue000\ue001\ue002\ue003\ue004\ue005\ue006", strict=True))
BOUNDARY = re.compile(f"([{PLACES[SB]}{PLACES[SE]}{PLACES[CB]}{PLACES[CE]}])")


def marked(case: Case) -> str:
    """The text with one private character in place of each marker's own text."""
    whole, run, position = "", [], 0
    for token_id in [*case.ids, None]:
        if token_id is not None and token_id not in MARKER_IDS:
            run.append(token_id)
            continue
        name = MARKER_IDS.get(token_id, "")
        text = TOKENIZER.decode(run, case.skip)
        whole += text[: max(0, len(case.text) - position)]
        position += len(text)
        if position <= len(case.text):
            whole += PLACES.get(name, "")
        run, position = [], position + len(name)
    return whole


def read_whole(case: Case) -> Answer:
    """The written rules applied to the whole answer at once; tools are declared and reasoning may be there."""
    answer, text, tb, te = Answer(finish_reason=case.end[0]), marked(case), PLACES["<think>"], PLACES["</think>"]
    if case.prompt[-1:] == (THINK,) or case.ids[:1] == [THINK]:
        size = min((text.index(m) for m in (te, PLACES[SB], PLACES[CB]) if m in text), default=len(text))
        answer.reasoning, text = re.sub("[\ue000-\ue006]", "", text[:size]), text[size:]
    opener, kind, in_section = "", "content", False
    pieces = ["", *BOUNDARY.split(re.sub(f"[{tb}{te}]", "", text))]
    num_complete, own_end = 0, case.end == ("stop", None)
    for place in range(0, len(pieces), 2):
        opener, piece = pieces[place], pieces[place + 1]
        is_last = place + 2 == len(pieces)
        if opener in (PLACES[SB], PLACES[SE]):
            in_section = opener == PLACES[SB]
            kind = "between" if in_section else "content"
        elif opener == PLACES[CE]:
            kind = "content" if kind == "content" else "between"
        elif opener == PLACES[CB]:
            kind = "call"
            header, has_arguments, arguments = piece.partition(PLACES[AB])
            name = called_function(header, case.rules.names) if has_arguments else None
            if name is not None and len(header) <= MAX_HEADER:
                arguments = arguments.replace(PLACES[AB], "")
                is_complete = own_end or not is_last
                blank = "{}" if is_complete else ""
                answer.calls.append(
                    [f"functions.{name}:{3 + len(answer.calls)}", name, arguments if arguments.strip() else blank]
                )
                num_complete += is_complete
                answer.errors += ["malformed"] * (is_last and own_end)
                continue
            is_long = len(header) > MAX_HEADER
            if has_arguments or is_long or own_end or not is_last:
                answer.errors.append("undeclared_function" if has_arguments and not is_long else "malformed")
        piece = piece.replace(PLACES[AB], "")
        if kind == "between":
            if not piece.strip():
                continue
            answer.errors += ["malformed"] * in_section
            kind = "stray" if in_section else "content"
        answer.content += piece
    if num_complete and case.end[0] == "stop" and not isinstance(case.end[1], str):
        answer.finish_reason = "tool_calls"
    return answer


def reasoning_ids(case: Case) -> int:
    inside, count = case.prompt[-1:] == (THINK,) or case.ids[:1] == [THINK], 0
    for token_id in case.ids:
        inside = inside and MARKER_IDS.get(token_id) not in (SB, CB)
        count += inside
        inside = inside and token_id != END_THINK
    return count


WORDS = st.sampled_from(["a", "b\n", " ", "\n ", " c d ", "漢😀", "{}", "é"]).map(emit)
LONG_HEADER = "x" * (MAX_HEADER + 1)
HEADERS = st.sampled_from(
    ["functions.a:0", " functions.b:12 ", "a", "functionsab.c7", "functions.zz:0", "é", "", LONG_HEADER]
)
ARGUMENTS = st.sampled_from(['{"x": "漢😀"}', "", " \n", " {}", "no json"])
CALLS = st.builds(call, HEADERS, ARGUMENTS).map(emit)
BEGUN = st.builds(lambda header, text: CB + header + AB + text, HEADERS, ARGUMENTS).map(emit)
SECTIONS = st.lists(CALLS, max_size=2).map(lambda calls: [*emit(SB), *(i for c in calls for i in c), *emit(SE)])
ODD = st.sampled_from([[TOKENIZER.im_end_id], *([byte] for byte in "é😀".encode())])
MARKUP = st.sampled_from([[token_id] for token_id in MARKER_IDS])
PARTS = st.lists(WORDS | WORDS | MARKUP | MARKUP | CALLS | BEGUN | SECTIONS | ODD, max_size=14)
IDS = st.builds(lambda first, parts: [i for part in (first, *parts) for i in part], st.just([]) | MARKUP, PARTS)
STEPS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=6)
STOPS = st.lists(st.sampled_from(["a", "é漢", "0}", '"}', "x:", "tool_call", "think>"]), max_size=2)
ENDS = st.sampled_from([("stop", None), ("stop", None), ("length", None), ("stop", 65)])


@st.composite
def cases(draw) -> Case:
    ids, skip = draw(IDS), draw(st.booleans())
    if draw(st.integers(0, 2)) == 0:  # cut by the budget, anywhere
        ids = ids[: draw(st.integers(0, len(ids)))]
    text, end = TOKENIZER.decode(ids, skip), draw(ENDS)
    found = [(text.index(stop), stop) for stop in draw(STOPS) if stop in text]
    if found:
        place, stop = min(found)
        text, end = text[:place], ("stop", stop)
    return Case(ids, text, prompt=draw(st.sampled_from([(THINK,), ()])), skip=skip, end=end)


def check_any_cut(case: Case, steps: list[tuple[int, int]]) -> None:
    expected = read_whole(case)
    expected.num_reasoning_tokens = reasoning_ids(case)
    for cut in (steps, AT_ONCE, ONE_BY_ONE):
        got = parse(case, cut)
        assert got == expected
    assert len({i for i, _, _ in got.calls}) == len(got.calls)
    shown = [got.reasoning, got.content, *(arguments for _, _, arguments in got.calls)]
    assert not any(marker in text for marker in MARKERS for text in shown)


@settings(max_examples=500, deadline=None)
@given(case=cases(), steps=STEPS)
def test_b029_b035_b097_any_cut_reads_the_same(case, steps):
    check_any_cut(case, steps)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=20_000, deadline=None)
@given(case=cases(), steps=STEPS)
def test_b029_b035_b097_any_cut_reads_the_same_long(case, steps):
    check_any_cut(case, steps)


@settings(max_examples=100, deadline=None)
@given(case=cases(), steps=STEPS, splits=st.booleans())
def test_b045_without_tools_their_markup_is_text(case, steps, splits):
    case.rules, case.splits = NO_TOOLS, splits
    got = parse(case, steps)
    assert got == parse(case, AT_ONCE)
    assert got.calls == got.errors == [] and got.finish_reason == case.end[0]
    if splits:
        thinking = ("<think>", "</think>")
        joined, text = got.reasoning + got.content, case.text
        # All of the text is there, save the markers of the reasoning, the last of which a stop string may have cut.
        assert len(text) - len(joined) <= sum(len(MARKER_IDS[i]) for i in case.ids if MARKER_IDS.get(i) in thinking)
        assert not any(marker in joined for marker in thinking)
    else:
        assert (got.reasoning, got.content) == ("", case.text)


def test_b033_b034_b035_every_split_of_two_calls_in_two_and_three():
    case = case_of("t</think>ok" + section(call("functions.a:0", '{"x":"é"}'), call("functions.b:1", '{"y":2}')))
    expected = parse(case, AT_ONCE)
    assert expected.calls == [["functions.a:3", "a", '{"x":"é"}'], ["functions.b:4", "b", '{"y":2}']]
    assert expected.finish_reason == "tool_calls" and expected.errors == []
    size, splits = len(case.ids), 0
    for first in range(1, size):
        for second in range(1, size - first + 1):
            assert parse(case, [(first, 0), (second, 0), (size, 0)]) == expected
            splits += 1
    assert splits > 1000


@pytest.mark.parametrize("script", ["hello", "", '{"a":1}', "[1]", "ok " + section("not a call")])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_b048_b051_prose_where_a_call_was_due_is_content(script, choice):
    """Never `tool_calls` with none; the grammar that forces a call is another matter."""
    rules = ToolRules(("a",), choice, "a" if choice == "named" else None)
    got = parse(case_of(script, rules=rules, prompt=()), ONE_BY_ONE)
    assert (got.content, got.calls, got.finish_reason) == (re.sub("<[^>]*>", "", script), [], "stop")


def test_b041_a_named_choice_returns_the_arguments_alone():
    case = case_of(
        "ok " + section(call("functions.a:0", '{"x":1}')), rules=ToolRules(("a", "b"), "named", "a"), prompt=()
    )
    for cut in (AT_ONCE, ONE_BY_ONE):
        got = parse(case, cut)
        assert (got.content, got.calls) == ("ok ", [["functions.a:0", "a", '{"x":1}']])
        assert got.finish_reason == "tool_calls"


NAMES = ("exec", "mcp.files.read", "a-b_2", "x:y", "f1", "functions.g", "n" * 64)


@pytest.mark.parametrize(
    ("header", "names", "name"),
    [
        ("functions.exec:5", NAMES, "exec"),
        (" functions.exec:5\n", NAMES, "exec"),
        ("functionsexec5", NAMES, "exec"),
        ("functions.exec5", NAMES, "exec"),
        ("exec:5", NAMES, "exec"),
        ("exec", NAMES, "exec"),
        ("functions.exec:", NAMES, "exec"),
        ("functions.unknown:0", NAMES, None),
        ("functions.exe:0", NAMES, None),
        ("functions.execute:0", NAMES, None),
        ("functions.exec:٣", NAMES, None),
        ("functions:5", NAMES, None),
        ("5", NAMES, None),
        ("", NAMES, None),
        *((f"functions.{name}:{n}", NAMES, name) for name in NAMES for n in (0, 12)),
        *((name, NAMES, name) for name in NAMES),
        # What can mean two functions means neither, unless the form of Kimi decides.
        ("functions.x:1", ("x", "x:1"), "x"),
        ("functions.x:1:2", ("x", "x:1"), "x:1"),
        ("functions.f1:2", ("f", "f1"), "f1"),
        ("functionsf12", ("f", "f1"), None),
        ("functions.f12", ("f", "f1"), None),
        ("functionsf2", ("f", "functionsf"), None),
    ],
)
def test_b030_b053_a_header_means_one_declared_name_or_none(header, names, name):
    assert called_function(header, frozenset(names)) == name


def seconds(case: Case) -> float:
    """Processor time of reading an answer in one step and id by id."""
    start = time.process_time()
    parser = case.parser()
    parser.push(case.ids, case.text)
    parser = case.parser()
    for token_id in case.ids:
        parser.push([token_id], chr(token_id) if token_id < 256 else MARKER_IDS.get(token_id, ""))
    return time.process_time() - start


HALF_OPEN = {
    "arguments": SB + CB + "functions.a:0" + AB + "{}" * 10_000,
    "header": CB + "functions." * 3_000,
    "blank": SB + " " * 30_000,
    "blank arguments": CB + "a" + AB + " " * 30_000,
    "sections": SB * 10_000,
    "calls": (CB + "a" + AB) * 5_000,
    "ends": (CE + SE + " ") * 5_000,
    "thoughts": "a</think>" * 10_000,
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HALF_OPEN)
def test_b181_half_open_markers_take_linear_time(name):
    many = ToolRules((*(f"a{i}" for i in range(199)), "a"), "auto")
    whole = emit(HALF_OPEN[name])
    small, large = (Case(ids, TOKENIZER.decode(ids), many) for ids in (whole[: len(whole) // 8], whole))
    # Quadratic time would be 64 times as long; the floor keeps short measurements out of it.
    assert min(seconds(large) for _ in range(2)) < 32 * max(seconds(small), 0.02)


def test_b181_a_megabyte_of_spelled_markers_is_text():
    spelled = "<|tool_calls_section_begin" * 40_000
    ids = list(spelled.encode())  # as tokens of one byte
    parser, answer = Case(ids, spelled, prompt=()).parser(), Answer()
    for place in range(0, len(ids), 1000):
        answer.take(parser.push(ids[place : place + 1000], spelled[place : place + 1000]))
    assert len(ids) > 1_000_000 and answer.content == spelled and parser.finish("stop", None) == ([], "stop")
