"""The splitter against a plain oracle, for any ids, any cut, any lag of the text and any early end."""

from hypothesis import given
from hypothesis import strategies as st

from engine.server.reasoning import ReasoningMarkers, ReasoningSplitter
from tests.engine.server.harness import tokenizer

TOKENIZER = tokenizer()
MARKERS = ReasoningMarkers.of(TOKENIZER)
SPECIAL = [MARKERS.begin, MARKERS.end, MARKERS.tools_begin]
IDS = st.lists(
    st.sampled_from(SPECIAL) | st.sampled_from([*b"ab<think>/", *"é😀".encode(), 260, TOKENIZER.im_end_id]), max_size=30
)


def labelled(ids: list[int], in_reasoning: bool, skip: bool) -> tuple[list[tuple[str | None, str]], int]:
    """Every character of the decoded text with its channel (None for a dropped marker), and the reasoning's length."""
    characters, run, channel, count = [], [], "reasoning" if in_reasoning else "content", 0
    for place, token in enumerate(ids):
        if token not in SPECIAL:
            run.append(token)
            count += channel == "reasoning"
            continue
        characters += [(channel, c) for c in TOKENIZER.decode(run, skip)]
        run, inside = [], channel == "reasoning"
        if token == MARKERS.begin:
            channel = "reasoning" if inside or place == 0 else "content"
        elif token == MARKERS.end or inside:
            channel = "content"
        count += channel == "reasoning" or (inside and token == MARKERS.end)
        shown = token == MARKERS.tools_begin
        characters += [(channel if shown else None, c) for c in TOKENIZER.decode([token], skip)]
    return characters + [(channel, c) for c in TOKENIZER.decode(run, skip)], count


@given(ids=IDS, in_reasoning=st.booleans(), skip=st.booleans(), data=st.data())
def test_against_the_oracle(ids, in_reasoning, skip, data):
    splitter = ReasoningSplitter(TOKENIZER, MARKERS, in_reasoning, skip)
    expected, num_reasoning = labelled(ids, in_reasoning, skip)
    text = TOKENIZER.decode(ids, skip)
    assert len(expected) == len(text)
    end = data.draw(st.integers(0, len(text)), label="where the text ends")
    got, position, sent = {"reasoning": "", "content": ""}, 0, 0
    while sent < len(ids):
        step = data.draw(st.integers(1, 5), label="ids at once")
        sent += step
        available = min(end, len(TOKENIZER.decode(ids[:sent], skip).rstrip("\ufffd")))
        upto = data.draw(st.integers(position, max(position, available)), label="text up to")
        for channel, piece in splitter.push(ids[sent - step : sent], text[position:upto]):
            got[channel] += piece
        position = upto
    for channel, piece in splitter.push([], text[position:end]):
        got[channel] += piece
    assert got == {name: "".join(c for channel, c in expected[:end] if channel == name) for name in got}
    assert splitter.num_reasoning_tokens == num_reasoning


def test_many_markers_cost_linear_time():
    splitter = ReasoningSplitter(TOKENIZER, MARKERS, True, True)
    ids = [97, MARKERS.end] * 50_000
    pieces = splitter.push(ids, TOKENIZER.decode(ids))
    assert "".join(piece for _, piece in pieces) == "a" * 50_000
