"""What a body's values may be, beyond being JSON: finite numbers of a sane size, whole characters, few levels.

Values are weighed level by level and in bulk, since a body may hold half a million of them; where one lies is looked
for only once something is known to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from engine.server.errors import ApiError, bad_request

MAX_DEPTH = 64
MAX_INTEGER = 2**64
MAX_PATH = 200  # characters of a field's name in an error
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")


class NotFinite(float):
    """NaN, Infinity or -Infinity: words that Python reads and JSON does not have."""


def check_values(root: dict[str, Any]) -> None:
    """Raises 400 for what `root` must not hold; `param` is the path of a number, else the top-level field."""
    _check_texts(root, None)
    for field, value in root.items():
        level, depth = [value], 1
        while level:
            kinds = set(map(type, level))
            if str in kinds:
                _check_texts((item for item in level if type(item) is str), field)
            if not kinds.isdisjoint((int, float, NotFinite)):
                _check_numbers(level, field, value)
            if kinds.isdisjoint((dict, list)):
                break
            if depth >= MAX_DEPTH:
                raise bad_request(f"{field} is nested more than {MAX_DEPTH} levels deep.", field)
            _check_texts(chain.from_iterable(item for item in level if type(item) is dict), field)
            level = list(chain.from_iterable(map(_inside, level)))
            depth += 1


def _inside(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    return value if type(value) is list else ()


def _check_texts(texts: Iterable[str], field: str | None) -> None:
    if _LONE_SURROGATE.search("".join(texts)):
        where = field or "A field name"
        raise bad_request(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff); send whole characters.", field)


def _check_numbers(level: list[Any], field: str, value: Any) -> None:
    numbers = [item for item in level if type(item) is int or type(item) is float]
    if len(numbers) < len(level) and any(type(item) is NotFinite for item in level):
        problem = "is NaN or infinite, which is not JSON; numbers must be finite"
        raise _number_error(field, value, problem, _is_not_finite)
    if numbers and not -MAX_INTEGER < min(numbers) <= max(numbers) < MAX_INTEGER:
        raise _number_error(field, value, "is a number that is out of range", _is_too_large)


def _is_not_finite(value: Any) -> bool:
    return type(value) is NotFinite


def _is_too_large(value: Any) -> bool:
    return type(value) in (int, float) and not -MAX_INTEGER < value < MAX_INTEGER


def _number_error(field: str, value: Any, problem: str, is_wrong: Callable[[Any], bool]) -> ApiError:
    place = _find(field, value, is_wrong).encode("utf-8", "replace").decode()[:MAX_PATH]
    return bad_request(f"{place} {problem}.", place)


def _find(field: str, value: Any, is_wrong: Callable[[Any], bool]) -> str:
    """The path of the first wrong value within `value`, as in a.b[0]."""
    path: list[str | int] = []
    todo = [iter([(field, value)])]
    while todo:
        for key, item in todo[-1]:
            if is_wrong(item):
                return "".join([field, *map(_step, path[1:]), *([_step(key)] if path else [])])
            if isinstance(item, dict | list) and item:
                path.append(key)
                todo.append(_items(item))
                break
        else:
            todo.pop()
            del path[len(todo) - 1 :]
    return field


def _items(value: dict[str, Any] | list[Any]) -> Iterator[tuple[str | int, Any]]:
    return iter(value.items()) if isinstance(value, dict) else enumerate(value)


def _step(key: str | int) -> str:
    return f"[{key}]" if isinstance(key, int) else f".{key}"
