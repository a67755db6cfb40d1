"""Stop strings against an oracle that sees the whole text at once; the cuts must not matter."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings

ALPHABET = "ab漢字"
texts = st.text(ALPHABET, max_size=24)
stops_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], include: bool, first_end: int = 0) -> tuple[str, str | None]:
    """Tries every end from the left: the first at which some stop string ends, the longest of them."""
    for end in range(first_end, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    finder = StopStrings(stops, include)
    shown = [finder.push(piece) for piece in pieces]
    rest = "" if finder.matched is not None else finder.flush()
    return "".join(shown) + rest, finder.matched, shown


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(texts, stops_lists, st.booleans(), st.lists(st.integers(0, 24), max_size=8))
def test_any_cut_gives_the_same_text_and_match(text, stops, include, places):
    shown, matched, _ = run(cut(text, places), stops, include)
    assert (shown, matched) == expected(text, stops, include)
    assert run(list(text), stops, include)[:2] == (shown, matched)


@given(texts, stops_lists, st.lists(st.integers(0, 24), max_size=8))
def test_nothing_shown_is_ever_taken_back(text, stops, places):
    """What is out at any time is a start of the final text, and no more than a possible stop string is held."""
    final, matched, shown = run(cut(text, places), stops, include=False)
    assert final.startswith("".join(shown))
    if matched is None:
        assert len(final) - len("".join(shown)) < max([len(s) for s in stops], default=1)


@given(texts, texts, stops_lists.filter(bool), st.booleans(), st.lists(st.integers(0, 24), max_size=6))
def test_stop_strings_that_end_too_early_do_not_count(early, text, stops, include, places):
    """Those complete within `early` are plain text; one that only begins there counts, and never leaks."""
    finder = StopStrings(stops, include)
    shown = "".join(finder.push(piece, may_stop=False) for piece in cut(early, places))
    shown += "".join(finder.push(piece) for piece in cut(text, places))
    shown += "" if finder.matched is not None else finder.flush()
    assert (shown, finder.matched) == expected(early + text, stops, include, first_end=len(early) + 1)


@pytest.mark.parametrize(
    ("text", "stops", "visible", "matched"),
    [
        ("The quick brown fox", ["own fox"], "The quick br", "own fox"),
        ("alpha beta gamma delta", ["beta gamma"], "alpha ", "beta gamma"),
        ("x漢字", ["漢字", "字x", "ab", "abc"], "x", "漢字"),
        ("漢 字x", ["漢字", "字x", "ab", "abc"], "漢 ", "字x"),
        ("xabc", ["漢字", "字x", "ab", "abc"], "x", "ab"),
        ("xa漢", ["漢字", "字x", "ab", "abc"], "xa漢", None),
        ("hi", ["zzz"], "hi", None),
        ("hiz", ["zzz"], "hiz", None),
        ("(a+)+$" + "a" * 30 + "!", ["(a+)+$"], "", "(a+)+$"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_b092_b094_b095_reported_cases(text, stops, visible, matched, size):
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(pieces, stops, include=False)[:2] == (visible, matched)


def test_nothing_comes_after_a_match():
    finder = StopStrings(["b"])
    assert finder.push("abc") == "a" and finder.matched == "b"
    assert finder.push("more") == ""


def seconds(num_characters: int) -> float:
    finder = StopStrings(["<|end|>" * 8, "</stop>", "(a+)+$"])
    began = time.process_time()
    for _ in range(num_characters // 8):
        finder.push("<|end|>a")
    return time.process_time() - began


def test_half_open_markers_take_linear_time():
    seconds(1000)
    short = min(seconds(20_000) for _ in range(3))
    assert seconds(200_000) < 40 * short, "ten times the text may not take a hundred times as long"


def test_long_stop_strings_cost_no_more_than_short_ones():
    """All but the first begin with another character, and the first has the text held back for long."""
    stops = ["a" * 999 + "z", *(chr(0x4E00 + i) + "a" * 999 for i in range(63))]
    started = time.thread_time()
    for _ in range(8):
        finder = StopStrings(stops)
        assert "".join(finder.push("a") for _ in range(900)) == "" and finder.flush() == "a" * 900
    assert time.thread_time() - started < 5
