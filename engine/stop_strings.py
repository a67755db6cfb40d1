"""Finds stop strings in text that arrives in pieces, without ever letting the start of one out."""

from __future__ import annotations

import functools


class _Search:
    """Where the text so far stands in one stop string. A character costs the same however long the string is."""

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0  # the longest beginning of the stop string, short of all of it, that ends the text
        self._shorter = _shorter_beginnings(stop)

    def read(self, character: str) -> bool:
        """Whether the stop string is complete."""
        matched = _after(self.stop, self._shorter, character, self.num_matched)
        is_complete = matched == len(self.stop)
        self.num_matched = self._shorter[-1] if is_complete else matched
        return is_complete


@functools.lru_cache(maxsize=1024)
def _shorter_beginnings(stop: str) -> list[int]:
    """[i]: the length of the longest beginning of `stop` that also ends stop[:i + 1], short of all of it."""
    found = [0]
    for character in stop[1:]:
        found.append(_after(stop, found, character, found[-1]))
    return found


def _after(stop: str, shorter: list[int], character: str, matched: int) -> int:
    """How much of `stop` ends a text that went on with `character` where `matched` of it ended the text."""
    while matched and stop[matched] != character:
        matched = shorter[matched - 1]
    return matched + (stop[matched] == character)


class StopStrings:
    """Holds back the tail that may become a stop string. The result does not depend on how the text was cut.

    The match that is complete first wins; of two that end together, the one that starts first.
    """

    def __init__(self, stops: list[str], include_in_output: bool = False):
        self._searches = [_Search(stop) for stop in stops]
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that may be shown now. After a match `matched` names the stop string and nothing more comes.

        may_stop=False: a stop string whose last character is in `text` does not count; one that only begins there does.
        """
        if self.matched is not None:
            return ""
        if not self._searches:
            return text
        num_old = len(self._held)
        text = self._held + text
        self._held = ""
        for place in range(num_old, len(text)):
            complete = [search.stop for search in self._searches if search.read(text[place])]
            if complete and may_stop:
                self.matched = max(complete, key=len)
                end = place + 1
                return text[: end if self._include else end - len(self.matched)]
        cut = len(text) - max(search.num_matched for search in self._searches)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held when the text ended without a match."""
        held, self._held = self._held, ""
        return held
