"""Synthetic tokenizer directories in Kimi's file layout."""

from __future__ import annotations

import json
from pathlib import Path

from engine.tokenizer import KIMI_SPECIAL_OFFSETS, VISIBLE_MARKERS, write_ranks

MERGES = [
    "th",
    "he",
    "the",
    " t",
    " th",
    " the",
    "in",
    "an",
    "er",
    "on",
    "or",
    " a",
    " w",
    "汉",
    "字",
    "é",
    "ing",
    "  ",
    "12",
]


def byte_ranks(merges: list[str] | None = None) -> list[bytes]:
    """The 256 single bytes, then `merges` in order; a character of several bytes gets its partial merges first."""
    ranks = [bytes([i]) for i in range(256)]
    for merge in MERGES if merges is None else merges:
        encoded = merge.encode()
        for stop in range(2, len(encoded) + 1):
            if encoded[:stop] not in ranks:
                ranks.append(encoded[:stop])
    return ranks


def added_tokens(num_ranks: int) -> dict[str, dict]:
    return {
        str(num_ranks + offset): {"content": name, "special": name not in VISIBLE_MARKERS}
        for name, offset in KIMI_SPECIAL_OFFSETS.items()
    }


def write_tokenizer(folder: Path, ranks: list[bytes] | None = None, config: dict | None = None) -> Path:
    """Writes tiktoken.model and tokenizer_config.json (unless `config` is {}); returns `folder`."""
    ranks = byte_ranks() if ranks is None else ranks
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder / "tiktoken.model", ranks)
    if config is None:
        config = {
            "tokenizer_class": "TikTokenTokenizer",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "added_tokens_decoder": added_tokens(len(ranks)),
        }
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
