"""The first stage of reading an answer: its token ids and its text become text pieces and markers, in order.

A marker is a control token, known by its id; what the model spells in ordinary tokens is text. The engine's text lags
behind its ids (half characters and possible stop strings are held back) and may end before them (at a stop string), but
it is always a prefix of the decoded ids. So the ids tell where in that decoded text, in characters, each marker lies,
and the text is cut at those places as it arrives. The result is the same however ids and text were cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from engine.tokenizer import IncrementalDecoder, Tokenizer


class Marker(Enum):
    THINK_BEGIN = auto()
    THINK_END = auto()
    SECTION_BEGIN = auto()
    SECTION_END = auto()
    CALL_BEGIN = auto()
    ARGUMENTS_BEGIN = auto()
    CALL_END = auto()


class _Place(NamedTuple):
    """A marker at character `start`; the text from there to `end` is its own and dropped."""

    start: int
    end: int
    marker: Marker


def reasoning_markers(tokenizer: Tokenizer) -> dict[int, Marker]:
    """By token id; markers that the vocabulary lacks are left out."""
    ids = {Marker.THINK_BEGIN: tokenizer.think_begin_id, Marker.THINK_END: tokenizer.think_end_id}
    return {token_id: marker for marker, token_id in ids.items() if token_id is not None}


def call_markers(tokenizer: Tokenizer) -> dict[int, Marker]:
    """By token id; markers that the vocabulary lacks are left out."""
    ids = {
        Marker.SECTION_BEGIN: tokenizer.tool_section_begin_id,
        Marker.SECTION_END: tokenizer.tool_section_end_id,
        Marker.CALL_BEGIN: tokenizer.tool_call_begin_id,
        Marker.ARGUMENTS_BEGIN: tokenizer.tool_argument_begin_id,
        Marker.CALL_END: tokenizer.tool_call_end_id,
    }
    return {token_id: marker for marker, token_id in ids.items() if token_id is not None}


class MarkedText:
    """The state of one choice. Of the markers in `shown` the own text stays in the text, behind the marker."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: Mapping[int, Marker],
        skip_special_tokens: bool,
        shown: frozenset[Marker] = frozenset(),
    ):
        self._markers = markers
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._widths = {token_id: len(tokenizer.decode([token_id], skip_special_tokens)) for token_id in markers}
        self._shown = shown
        self._places: deque[_Place] = deque()
        self._decoded = 0  # characters that the ids so far decode to
        self._position = 0  # characters of the text so far
        self._resume = 0  # the character where the text of the last marker ends

    def push(self, token_ids: list[int], text: str) -> list[str | Marker]:
        """What lies within `text`, with the markers up to its end; `token_ids` are all new ids, `text` may lag."""
        self._read(token_ids)
        items: list[str | Marker] = []
        begin, stop = self._position, self._position + len(text)
        cut = max(begin, self._resume)
        while self._places and self._places[0].start <= stop:
            start, end, marker = self._places.popleft()
            if cut < start:
                items.append(text[cut - begin : start - begin])
            items.append(marker)
            cut = max(begin, end)
        if cut < stop:
            items.append(text[cut - begin :])
        self._position, self._resume = stop, max(cut, stop)
        return items

    def _read(self, token_ids: list[int]) -> None:
        """Notes where the markers lie. The bytes of half a character end before a marker as one U+FFFD."""
        run_start = 0
        for place, token_id in enumerate(token_ids):
            marker = self._markers.get(token_id)
            if marker is None:
                continue
            self._decoded += len(self._decoder.push(token_ids[run_start : place + 1]))
            start = self._decoded - self._widths[token_id]
            self._places.append(_Place(start, start if marker in self._shown else self._decoded, marker))
            run_start = place + 1
        self._decoded += len(self._decoder.push(token_ids[run_start:] if run_start else token_ids))
