"""Finds stop strings in text that arrives in pieces, without ever letting the start of one out."""

from __future__ import annotations


class StopStrings:
    """Holds back the tail that may become a stop string. The result does not depend on how the text was cut.

    The match that is complete first wins; of two that end together, the one that starts first.
    """

    def __init__(self, stops: list[str], include_in_output: bool = False):
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that may be shown now. After a match `matched` names the stop string and nothing more comes.

        may_stop=False: a stop string whose last character is in `text` does not count; one that only begins there does.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        num_old = len(self._held)
        text = self._held + text
        self._held = ""
        match = self._first_match(text, num_old) if may_stop else None
        if match is not None:
            start, self.matched = match
            return text[: start + len(self.matched) if self._include else start]
        cut = len(text) - self._possible_start(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held when the text ended without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_old: int) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends after the first `num_old` characters."""
        found = [(text.find(stop, max(num_old - len(stop) + 1, 0)), stop) for stop in self._stops]
        found = [(start, stop) for start, stop in found if start >= 0]
        return min(found, key=lambda f: (f[0] + len(f[1]), f[0]), default=None)

    def _possible_start(self, text: str) -> int:
        """Length of the longest tail of `text` that begins some stop string."""
        return max(_overlap(text, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
