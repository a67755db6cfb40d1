"""What a schema, regular expression or grammar may be at most, so that compiling it takes a quarter of a second.

No wall clock: all ranks must agree. The numbers are from measurements of llguidance 1.9 (docs/structured_output.md):
its time for one object grows with the square of its properties, for an expression with the square of its repetitions,
and for a wrong Lark grammar with the square of how deep rules refer to rules; its stack grows with that depth too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

MAX_TEXT = 256 * 1024
MAX_REGEX = 16 * 1024
MAX_CHOICES = 10_000
MAX_KEYS = 1_000  # of one object
MAX_NESTING = 100
MAX_SIZE = 4_000  # of all schemas together, by `_size`: some 50 us each
MAX_REPEATS = 2_000  # of all expressions together: ?, *, +, {
MAX_RULES = 4_000  # lines
MAX_ALTERNATIVES = 4_000
MAX_RULE_DEPTH = 200
MAX_PATTERNS = 8  # that have to hold together: each may double the time, and no limit of llguidance counts that

_PLAIN = re.compile(r'"(?:\\[^\n]|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\[^\n]|[^/\\\n])+/')
_BLOCK = re.compile(r"%(?:json|regex|llguidance)\s*(?=\{)")
_HEADER = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)[^\n:|]*:", re.MULTILINE)
_OPERATOR = re.compile(r"[&~]")
_NAME = re.compile(r"[A-Za-z_]\w*")
_REPEAT = re.compile(r"\\.|([?*+{~])", re.DOTALL)
_NUMBER_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_BECOMES_EXPRESSION = frozenset(("pattern", "format", "multipleOf", *_NUMBER_BOUNDS))


class Refusal(Exception):
    """What is wrong, as the rest of a sentence. All checks raise it."""


def check_length(text: str, most: int = MAX_TEXT) -> None:
    if len(text) > most:
        raise Refusal(f"it has {len(text)} characters, more than the {most} allowed")


def check_json(text: str) -> Any:
    """The value of a JSON text."""
    check_length(text)
    try:
        value = json.loads(text)
    except RecursionError:
        raise Refusal(f"it is nested deeper than {MAX_NESTING} levels") from None
    except ValueError as error:
        raise Refusal(f"it is no JSON ({error})") from None
    check_trees([value])
    check_patterns(value)
    return value


def check_trees(values: list[Any]) -> None:
    """All schemas of one grammar."""
    level, depth, size, repeats = values, 0, 0, 0
    while level:
        for node in level:
            if isinstance(node, dict) and len(node) > MAX_KEYS:
                raise Refusal(f"an object in it has {len(node)} keys, more than the {MAX_KEYS} allowed")
            if isinstance(node, dict):
                size += _size(node)
                repeats += sum(map(count_repeats, _patterns(node)))
        _check_counts(("units of size", size, MAX_SIZE), ("repetitions in its patterns", repeats, MAX_REPEATS))
        level = [child for node in level for child in _children(node)]
        depth += 1
        if level and depth > MAX_NESTING:
            raise Refusal(f"it is nested deeper than {MAX_NESTING} levels")


def _children(node: Any) -> Iterator[Any]:
    values = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return (value for value in values if isinstance(value, dict | list))


def check_patterns(schema: Any) -> None:
    """Where a schema has parts that must hold together, all its patterns count as if they had to."""
    patterns, combines, nodes = set(), False, [schema]
    while nodes:
        node = nodes.pop()
        nodes += _children(node)
        if not isinstance(node, dict):
            continue
        own = {f"{key} {node[key]}" for key in ("pattern", "format") if isinstance(node.get(key), str)}
        all_of = node.get("allOf")
        combines |= isinstance(all_of, list) and len(all_of) + len(own) > 1
        combines |= any(key in node for key in ("$ref", "anyOf", "oneOf")) and (bool(own) or isinstance(all_of, list))
        patterns |= own
    if combines and len(patterns) > MAX_PATTERNS:
        raise Refusal(
            f"it has {len(patterns)} patterns and formats, and parts that hold together by allOf, anyOf, oneOf or "
            f"$ref, with which at most {MAX_PATTERNS} are allowed"
        )


def _size(node: dict[str, Any]) -> int:
    """About 50 us of compiling each: 1 an object and a thousandth of the square of its keys, 8 one whose values must
    match an expression, a tenth of what its integers must be a multiple of, an eighth of the square of its patterns
    for keys."""
    size = 1 + len(node) ** 2 // 1000
    if not _BECOMES_EXPRESSION.isdisjoint(node):
        size += 7
        factor = node.get("multipleOf")
        if isinstance(factor, int | float):
            size += int(min(10 * MAX_SIZE, abs(factor))) // 10
    patterns = node.get("patternProperties")
    return size + (len(patterns) ** 2 // 8 if isinstance(patterns, dict) else 0)


def _patterns(node: dict[str, Any]) -> Iterator[str]:
    patterns = node.get("patternProperties")
    for pattern in (node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str):
            yield pattern


def count_repeats(text: str) -> int:
    """Of an expression, or of a grammar's rules; in a class of characters they count too."""
    return sum(match.group(1) is not None for match in _REPEAT.finditer(text))


def check_regex(text: str) -> None:
    check_length(text, MAX_REGEX)
    _check_counts(("repetitions", count_repeats(text), MAX_REPEATS))


def check_lark(text: str) -> None:
    check_length(text)
    text = _without_blocks(text)
    plain = _PLAIN.sub(lambda match: " " * len(match.group()), text)
    expressions = "".join(match.group() for match in _PLAIN.finditer(text) if _is_expression(match.group()))
    repeats = count_repeats(plain) + count_repeats(expressions)
    text = plain
    if '"' in text or "/" in text:
        raise Refusal("a string or regular expression in it does not end on the line where it begins")
    _check_counts(
        ("lines", text.count("\n"), MAX_RULES),
        ("alternatives", text.count("|"), MAX_ALTERNATIVES),
        ("repetitions", repeats, MAX_REPEATS),
        ("rules that refer to rules in turn", _rule_depth(text), MAX_RULE_DEPTH),
        ("operators & and ~", len(_OPERATOR.findall(text)), MAX_PATTERNS),
    )


def _is_expression(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def _check_counts(*counts: tuple[str, int, int]) -> None:
    for what, count, most in counts:
        if count > most:
            raise Refusal(f"it has {count} {what}, more than the {most} allowed")


def _without_blocks(text: str) -> str:
    """Takes out the JSON that `%json` and its kind embed, once that is within bounds."""
    pieces, values, position = [], [], 0
    while (match := _BLOCK.search(text, position)) is not None:
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            raise Refusal(f"the JSON behind {match.group().strip()} in it cannot be read") from None
        values.append(value)
        check_patterns(value)
        pieces.append(text[position : match.start()])
        position = end
    check_trees(values)
    return "".join([*pieces, text[position:]])


def _rule_depth(text: str) -> int:
    """At least as many rules as the longest chain of references has: all of those in or above a cycle count."""
    headers = list(_HEADER.finditer(text))
    ends = [*(header.start() for header in headers), len(text)][1:]
    names = {header.group(1) for header in headers}
    refers: dict[str, set[str]] = {name: set() for name in names}
    for header, end in zip(headers, ends, strict=False):
        refers[header.group(1)] |= names.intersection(_NAME.findall(text, header.end(), end))
    depth = 0
    while leaves := [name for name, others in refers.items() if not others & refers.keys()]:
        for name in leaves:
            del refers[name]
        depth += 1
    return depth + len(refers)
