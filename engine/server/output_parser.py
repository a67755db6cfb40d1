"""The second stage of reading an answer: a small state machine from text and markers to what a client sees.

The rules are written down in docs/chat.md. Whatever the cut of ids and text, the joined deltas are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from itertools import groupby
from typing import Literal, NamedTuple

from engine.call_ids import call_id
from engine.server.call_headers import MAX_HEADER, called_function
from engine.server.marked_text import MarkedText, Marker, call_markers, reasoning_markers
from engine.server.tool_rules import ToolRules
from engine.tokenizer import Tokenizer

Channel = Literal["reasoning", "content"]
MALFORMED, UNDECLARED = PARSE_ERRORS = ("malformed", "undeclared_function")


class TextDelta(NamedTuple):
    channel: Channel
    text: str


class CallDelta(NamedTuple):
    """The beginning of a call; `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


class ArgumentsDelta(NamedTuple):
    index: int
    text: str


Delta = TextDelta | CallDelta | ArgumentsDelta


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()  # between calls; blank text is held
    STRAY = auto()  # text within a section that is no call, or of a call that is none
    HEADER = auto()
    ARGUMENTS = auto()


class OutputParser:
    """The state of one choice.

    num_reasoning_tokens: ids of the reasoning so far, `</think>` included. num_complete_calls: those whose end has
    come. errors: PARSE_ERRORS in the order found.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: list[int], rules: ToolRules, splits: bool, skip_special: bool
    ):
        """splits: whether the answer may hold reasoning, unless the prompt has closed it; `skip_special` as in
        `SamplingParams.skip_special_tokens`."""
        begin, end = tokenizer.think_begin_id, tokenizer.think_end_id
        self.splits = splits and end is not None and prompt_token_ids[-2:] != [begin, end]
        thinking = self.splits and begin is not None and prompt_token_ids[-1:] == [begin]
        self.num_reasoning_tokens = self.num_complete_calls = 0
        self.errors: list[str] = []
        self._rules, self._names = rules, frozenset(rules.names)
        calls = call_markers(tokenizer)
        self._markers = (reasoning_markers(tokenizer) if self.splits else {}) | calls
        shown = frozenset() if rules.parses_calls else frozenset(calls.values())
        self._text = MarkedText(tokenizer, self._markers, skip_special, shown)
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._is_first, self._counts = True, thinking
        self._in_section = self._has_arguments = False
        self._num_calls = 0
        self._held: list[str] = []
        self._num_held = 0
        self._deltas: list[Delta] = []

    def push(self, token_ids: list[int], text: str) -> list[Delta]:
        """What an engine's delta adds."""
        if token_ids:
            self._count(token_ids)
        for item in self._text.push(token_ids, text):
            if isinstance(item, str):
                self._take_text(item)
            else:
                self._take_marker(item)
        return self._take_deltas()

    def finish(self, finish_reason: str | None, stop_reason: str | int | None) -> tuple[list[Delta], str | None]:
        """What was held when the answer ended for the engine's reasons, and the reason to tell the client."""
        ended_itself = finish_reason == "stop" and stop_reason is None
        if self._state is _State.HEADER:
            if ended_itself:
                self.errors.append(MALFORMED)
            self._emit_held()
        elif self._state is _State.ARGUMENTS and ended_itself:
            self.errors.append(MALFORMED)
            self._end_call()
        if finish_reason == "stop" and not isinstance(stop_reason, str) and self.num_complete_calls:
            finish_reason = "tool_calls"
        return self._take_deltas(), finish_reason

    def _count(self, token_ids: list[int]) -> None:
        """Follows the reasoning through the ids, since the text may lag; `<think>` opens it as the very first only."""
        if self._is_first:
            self._is_first = False
            if self._markers.get(token_ids[0]) is Marker.THINK_BEGIN:
                self._state, self._counts = _State.REASONING, True
        if not self._counts:
            return
        for token_id in token_ids:
            marker = self._markers.get(token_id)
            if marker is Marker.SECTION_BEGIN or (marker is Marker.CALL_BEGIN and self._rules.parses_calls):
                self._counts = False
                return
            self.num_reasoning_tokens += 1
            if marker is Marker.THINK_END:
                self._counts = False
                return

    def _take_text(self, text: str) -> None:
        state = self._state
        if state is _State.REASONING:
            self._deltas.append(TextDelta("reasoning", text))
        elif state is _State.ARGUMENTS:
            self._take_arguments(text)
        elif state is _State.HEADER:
            self._hold(text)
            if self._num_held > MAX_HEADER:
                self._refuse(MALFORMED)
        elif state is _State.SECTION:
            self._take_stray(text)
        else:
            self._deltas.append(TextDelta("content", text))

    def _take_arguments(self, text: str) -> None:
        """Blank beginnings are held: arguments that stay blank become an empty object."""
        if not self._has_arguments:
            self._hold(text)
            if not text.strip():
                return
            text = self._take_held()
            self._has_arguments = True
        self._deltas.append(ArgumentsDelta(self._num_calls - 1, text))

    def _take_stray(self, text: str) -> None:
        self._hold(text)
        if not text.strip():
            return
        if self._in_section:
            self._refuse(MALFORMED)
        else:  # the call before it had no section, so this is the answer going on
            self._emit_held()
            self._state = _State.CONTENT

    def _take_marker(self, marker: Marker) -> None:
        if marker in (Marker.THINK_BEGIN, Marker.THINK_END):
            if marker is Marker.THINK_END and self._state is _State.REASONING:
                self._state = _State.CONTENT
        elif not self._rules.parses_calls:
            if marker is Marker.SECTION_BEGIN and self._state is _State.REASONING:
                self._state = _State.CONTENT
        elif marker is Marker.ARGUMENTS_BEGIN:
            if self._state is _State.HEADER:
                self._begin_call()
        else:
            self._leave(marker)

    def _leave(self, marker: Marker) -> None:
        """A marker that ends what there was before it."""
        among_calls = self._state not in (_State.REASONING, _State.CONTENT)
        if self._state is _State.HEADER:
            self._refuse(MALFORMED)
        elif self._state is _State.ARGUMENTS:
            self._end_call()
        if marker is Marker.SECTION_BEGIN:
            self._in_section = True
            self._go(_State.SECTION)
        elif marker is Marker.CALL_BEGIN:
            self._go(_State.HEADER)
        elif marker is Marker.CALL_END and among_calls:
            self._go(_State.SECTION)
        elif marker is Marker.SECTION_END and self._state is not _State.REASONING:
            self._in_section = False
            self._go(_State.CONTENT)

    def _go(self, state: _State) -> None:
        """What is held here is blank text between calls."""
        self._take_held()
        self._state = state

    def _begin_call(self) -> None:
        name = called_function("".join(self._held), self._names)
        if name is None:
            self._refuse(UNDECLARED)
            return
        number = self._rules.first_number + self._num_calls
        self._deltas.append(CallDelta(self._num_calls, call_id(name, number), name))
        self._num_calls += 1
        self._has_arguments = False
        self._go(_State.ARGUMENTS)

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._deltas.append(ArgumentsDelta(self._num_calls - 1, "{}"))
        self.num_complete_calls += 1
        self._go(_State.SECTION)

    def _refuse(self, error: str) -> None:
        """What is held, and all up to the next marker, is no call and so content."""
        self.errors.append(error)
        self._emit_held()
        self._state = _State.STRAY

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _take_held(self) -> str:
        text = "".join(self._held)
        self._held, self._num_held = [], 0
        return text

    def _emit_held(self) -> None:
        text = self._take_held()
        if text:
            self._deltas.append(TextDelta("content", text))

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas if len(deltas) < 2 else list(_merged(deltas))


def _merged(deltas: list[Delta]) -> Iterator[Delta]:
    """Neighbours of the same kind as one."""
    for _, group in groupby(deltas, key=lambda delta: delta if isinstance(delta, CallDelta) else delta[0]):
        first, *rest = group
        yield first._replace(text="".join([first.text, *(d.text for d in rest)])) if rest else first
