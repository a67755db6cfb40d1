"""Running prose: novels, the World English Bible, two manuals and the Jargon File. Each source yields plain texts."""

from __future__ import annotations

import gzip
import html
import re
import struct
import zlib
from collections.abc import Iterator

from models.kimi_k25.training.cleaning import group, html_paragraphs, is_blocked, normalise, paragraphs
from models.kimi_k25.training.packages import Packages

_CHARSXP = 9


def novels(packages: Packages) -> Iterator[str]:
    """Six novels by Jane Austen, read from an R lazy-load database: zlib chunks that hold vectors of strings."""
    folder = packages.deb("r-cran-janeaustenr") / "usr/lib/R/site-library/janeaustenr/data"
    data = (folder / "Rdata.rdb").read_bytes()
    at = 0
    while at < len(data):
        inflate = zlib.decompressobj()
        raw = inflate.decompress(data[at + 4 :])
        at = len(data) - len(inflate.unused_data)
        found = [normalise(p.replace("_", "")) for p in paragraphs("\n".join(_r_strings(raw)))]
        yield from group(p for p in found if len(p) > 25 and not p.isupper())


def _r_strings(raw: bytes) -> Iterator[str]:
    at = raw.index(b"UTF-8") + 5 + 8
    while at + 8 <= len(raw):
        flags, length = struct.unpack(">Ii", raw[at : at + 8])
        if flags & 255 != _CHARSXP:
            return
        at += 8
        yield raw[at : at + max(length, 0)].decode("utf-8", "replace")
        at += max(length, 0)


def web_bible(packages: Packages) -> Iterator[str]:
    """Modern-English Bible in the public domain; SWORD zText is an index of zlib blocks of OSIS markup."""
    root = packages.deb("sword-text-web") / "usr/share/sword/modules/texts/ztext"
    folder = next(p for p in sorted(root.iterdir()) if p.is_dir())
    for testament in ("ot", "nt"):
        index = (folder / f"{testament}.bzs").read_bytes()
        blocks = (folder / f"{testament}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index[: len(index) // 12 * 12]):
            text = zlib.decompress(blocks[offset : offset + size]).decode("utf-8", "replace")
            yield from group(_osis_paragraphs(text), 2500)


def _osis_paragraphs(text: str) -> list[str]:
    text = re.sub(r"(?s)<note.*?</note>|<title.*?</title>", "", text)
    text = re.sub(r"<(?:div|lg|l|lb|p)\b[^>]*>", "\n", text)
    lines = (normalise(html.unescape(re.sub(r"<[^>]+>", "", line))).replace("\n", " ") for line in text.split("\n"))
    return [line for line in lines if len(line) > 60 and not is_blocked(line)]


def python_manual(packages: Packages) -> Iterator[str]:
    root = packages.deb("python3.11-doc") / "usr/share/doc/python3.11/html/_sources"
    for part in ("tutorial", "howto", "faq", "reference", "using", "library", "extending"):
        for path in sorted((root / part).rglob("*.txt")):
            yield from group(_rst_paragraphs(path.read_text(encoding="utf-8")))


def _rst_paragraphs(text: str) -> list[str]:
    kept = []
    for part in re.split(r"\n\s*\n", text):
        if part.lstrip().startswith(("..", ":", "+--", "|", "==", ">>>")) or re.match(r"\s{4,}", part):
            continue
        part = re.sub(r"(?m)^\s*[=\-*~^#\"+.]{3,}\s*$", "", part)
        part = re.sub(r":[\w:+-]+:`~?!?([^`<]*?)(?:\s*<[^`]*>)?`", r"\1", part)
        part = re.sub(r"``([^`]*)``", r"\1", part)
        part = re.sub(r"`([^`<]*?)\s*<[^`]*>`__?", r"\1", part)
        part = re.sub(r"[*]{1,2}(\S[^*]*?)[*]{1,2}|`([^`]*)`_?", lambda m: m.group(1) or m.group(2) or "", part)
        part = normalise(re.sub(r"\\(.)", r"\1", part).replace("::", ":").replace("\n", " "))
        if len(part) > 60 and part[-1] in ".!?:)":
            kept.append(part)
    return kept


def postgres_manual(packages: Packages) -> Iterator[str]:
    folder = packages.deb("postgresql-doc-15") / "usr/share/doc/postgresql-doc-15/html"
    for path in sorted(folder.glob("*.html")):
        if not re.search(r"release|errcodes|bookindex|features|contrib", path.name):
            yield from group(html_paragraphs(path))


def jargon_file(packages: Packages) -> Iterator[str]:
    path = packages.deb("jargon-text") / "usr/share/doc/jargon-text/jargon.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    found = [normalise(p.replace("_", "")) for p in paragraphs(text)]
    yield from group(p for p in found if len(p) > 80 and not is_blocked(p) and p[-1] in ".!?)")
