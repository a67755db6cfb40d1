"""Splits one answer into reasoning and content at the *id* of `</think>`, never at its text.

The engine's text lags behind its ids (half characters and possible stop strings are held back) and may end before
them (at a stop string), but it is always a prefix of the decoded ids. So the ids tell where, in characters of that
decoded text, each marker lies, and the text is cut at those places as it arrives. What the model spells out in
ordinary tokens as "</think>" is text like any other. Stop strings apply to the whole output, reasoning included.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

Channel = Literal["reasoning", "content"]


@dataclass(frozen=True)
class ReasoningMarkers:
    """Ids of the tokens that bound reasoning, each None if the vocabulary has no such token.

    `tools_begin` ends the reasoning too: the model may open a tool section without closing its thoughts.
    """

    begin: int | None
    end: int | None
    tools_begin: int | None

    @classmethod
    def of(cls, tokenizer: Any) -> ReasoningMarkers:
        return cls(tokenizer.think_begin_id, tokenizer.think_end_id, tokenizer.tool_section_begin_id)

    def may_reason(self, prompt_token_ids: list[int]) -> bool:
        """False if the vocabulary has no marker or the prompt has closed the reasoning before the answer begins."""
        return self.end is not None and prompt_token_ids[-2:] != [self.begin, self.end]

    def opened_by(self, prompt_token_ids: list[int]) -> bool:
        """Whether the prompt leaves the answer inside the reasoning."""
        return self.begin is not None and prompt_token_ids[-1:] == [self.begin]


@dataclass(frozen=True)
class _Cut:
    """Drop the characters from `start` to `end`, then go on in `channel`."""

    start: int
    end: int
    channel: Channel


class ReasoningSplitter:
    """The state of one choice. `in_reasoning` says where the answer starts.

    An answer that starts in content may still open its reasoning with `<think>` as its very first token; anywhere
    else a `<think>` is swallowed, and so is every `</think>` but the first.
    """

    def __init__(self, tokenizer: Any, markers: ReasoningMarkers, in_reasoning: bool, skip_special_tokens: bool):
        self.num_reasoning_tokens = 0
        self._tokenizer = tokenizer
        self._markers = markers
        self._skip = skip_special_tokens
        self._id_channel: Channel = "reasoning" if in_reasoning else "content"
        self._may_open = not in_reasoning
        self._run: list[int] = []  # ids since the last marker, which starts at character _run_start
        self._run_start = 0
        self._cuts: deque[_Cut] = deque()
        self._text_channel: Channel = self._id_channel
        self._position = 0

    def push(self, token_ids: list[int], text: str) -> list[tuple[Channel, str]]:
        """What `text` adds to each channel, in order; `token_ids` are all ids up to now, `text` may lag behind."""
        for token_id in token_ids:
            self._read_id(token_id)
        pieces: list[tuple[Channel, str]] = []
        begin, stop = self._position, self._position + len(text)
        while self._position < stop:
            cut = self._cuts[0] if self._cuts else None
            if cut is not None and self._position >= cut.start:
                self._position = min(stop, cut.end)
                if self._position == cut.end:
                    self._text_channel = cut.channel
                    self._cuts.popleft()
                continue
            end = stop if cut is None else min(stop, cut.start)
            pieces.append((self._text_channel, text[self._position - begin : end - begin]))
            self._position = end
        return pieces

    def _read_id(self, token_id: int) -> None:
        markers, inside = self._markers, self._id_channel == "reasoning"
        if token_id == markers.begin:
            self._id_channel = "reasoning" if inside or self._may_open else "content"
            self._cut(token_id, keep=False)
        elif token_id == markers.end:
            self._id_channel = "content"
            self._cut(token_id, keep=False)
        elif inside and token_id == markers.tools_begin:
            self._id_channel = "content"
            self._cut(token_id, keep=True)
        else:
            self._run.append(token_id)
        self._may_open = False
        # The closing marker counts as reasoning, a tool section does not.
        self.num_reasoning_tokens += self._id_channel == "reasoning" or (inside and token_id == markers.end)

    def _cut(self, token_id: int, keep: bool) -> None:
        """Notes where the marker lies: its own text ends the text of the run before it."""
        end = self._run_start + len(self._decode([*self._run, token_id]))
        start = end - len(self._decode([token_id]))
        self._cuts.append(_Cut(start, start if keep else end, self._id_channel))
        self._run, self._run_start = [], end

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
