"""Normalises text and refuses what a small public model should not learn."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path

_PLAIN = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": " - ",
        "\u2212": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\u2022": "*",
        "\u00ad": "",
        "\u200b": "",
        "\ufeff": "",
        "\u00b6": "",
        "\r": None,
    }
)
_BLOCKED = re.compile(
    r"\b(f+u+c+k\w*|sh[i1]t\w*|cunt\w*|nigg\w*|fag\w*|bitch\w*|whore\w*|slut\w*|porn\w*|rape[ds]?|rapist|sex\w*|penis|"
    r"vagina|dick|cock|boobs?|tits|ass|asshole|bastard|retard\w*|suicid\w*|kill (?:my|your)self|nazi\w*|hitler|cocaine|"
    r"heroin|horny|nude\w*|trump|clinton|damn\w*|masturbat\w*|orgasm\w*|prostitut\w*)\b",
    re.IGNORECASE,
)
_PRIVATE = re.compile(
    r"\d{3}[-. )]*\d{3,4}[-. ]*\d{4}|@\w|"
    r"\b(snapchat|instagram|facebook|phone number|my number|last name|address|email)\b",
    re.IGNORECASE,
)


def is_blocked(text: str) -> bool:
    return bool(_BLOCKED.search(text))


def is_private(text: str) -> bool:
    """Whether the text holds a phone number, a mail address, a handle, or talks about one."""
    return bool(_PRIVATE.search(text))


def normalise(text: str) -> str:
    """NFC, plain quotes and dashes, no control characters, single spaces, at most one empty line in a row."""
    text = unicodedata.normalize("NFC", text.translate(_PLAIN))
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" *\n *", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def ascii_share(text: str) -> float:
    return sum(c < "\x7f" for c in text) / max(1, len(text))


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def paragraphs(text: str) -> list[str]:
    """Paragraphs of hard-wrapped text, each joined to one line."""
    return [one_line(p) for p in re.split(r"\n\s*\n", text) if p.strip()]


def group(parts: Iterable[str], size: int = 2800, least: int = 200) -> Iterator[str]:
    """Joins consecutive paragraphs into documents of about `size` characters; drops a rest below `least`."""
    buffer: list[str] = []
    count = 0
    for part in parts:
        buffer.append(part)
        count += len(part)
        if count >= size:
            yield "\n\n".join(buffer)
            buffer, count = [], 0
    if count > least:
        yield "\n\n".join(buffer)


class _BodyText(HTMLParser):
    BLOCK = frozenset(
        ["p", "div", "li", "dt", "dd", "h1", "h2", "h3", "h4", "tr", "pre", "section", "table", "ul", "ol", "br"]
    )
    SKIP = frozenset(["script", "style", "head", "nav", "table", "pre"])

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.skipping = 0

    def handle_starttag(self, tag, attrs) -> None:
        self.skipping += tag in self.SKIP
        if tag in self.BLOCK:
            self.pieces.append("\n\n")

    def handle_endtag(self, tag) -> None:
        if tag in self.SKIP and self.skipping:
            self.skipping -= 1
        if tag in self.BLOCK:
            self.pieces.append("\n\n")

    def handle_data(self, data) -> None:
        if not self.skipping:
            self.pieces.append(data)


def html_paragraphs(path: Path) -> list[str]:
    """Sentences-ending paragraphs of a page's body, without tables and code."""
    parser = _BodyText()
    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    found = [normalise(one_line(p)) for p in "".join(parser.pieces).split("\n\n")]
    return [p for p in found if len(p) > 60 and p[-1] in ".!?:"]
