"""Reads the small text files of a checkpoint directory, whatever lies there under their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config import ConfigError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ConfigError for what cannot be read, a pipe or a device included."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file; put the checkpoint's own file there.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot read {path} ({error}); get the file again.") from error


def parse_json(text: str, repeats: bool = True) -> Any:
    """`json.loads`, with every failure a ValueError, that of the deepest nesting too; without `repeats` a name that
    stands twice in an object is one."""
    try:
        return json.loads(text, object_pairs_hook=None if repeats else _each_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice[:40]!r} stands there twice")
    return dict(pairs)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError naming the file for anything else."""
    text = read_text(path)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"Cannot read {path} as JSON ({error}); get the file again.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return data


def token_ids(value: Any, place: str, vocab_size: int) -> tuple[int, ...]:
    """One id, several or null. Raises ValueError naming `place` for anything else, and outside the vocabulary."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ValueError(f"{place} must be token ids below {vocab_size}, not {str(value)[:40]}.")
    return tuple(ids)
