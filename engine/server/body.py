"""From the bytes of a request to a checked model: size, content type, JSON, depth, Unicode, numbers, then types.

Whatever is wrong is the client's fault and becomes a 4xx that names the field; nothing here can end in a 500.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from engine.server.errors import ApiError, bad_request
from engine.server.limits import check_limits

MAX_DEPTH = 64
MAX_INTEGER = 2**64
LARGE_BODY = 256 * 1024
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_UNION_TAG = re.compile(r"^(str|int|float|bool|dict|list|none|constrained.*|function.*|.*\[.*)$")

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises 413 once it is known to pass `max_bytes`, however it is sent."""
    too_large = ApiError(413, f"The request body is larger than the limit of {max_bytes} bytes.", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The content type is {kind or 'absent'}; send the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not supported; send the body as it is.")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises 400 for anything else, NaN, infinities, deep nesting and lone surrogates."""

    def refuse_constant(name: str) -> None:
        raise bad_request(f"The body holds {name}, which is not JSON; numbers must be finite.")

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError:
        raise bad_request("The body is not UTF-8 text.") from None
    except RecursionError:
        raise bad_request(f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    except json.JSONDecodeError as exc:
        raise bad_request(f"The body is not valid JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}.") from None
    except ValueError:
        raise bad_request("The body holds a number with too many digits.") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    _check_values(value)
    return value


def _check_values(root: dict[str, Any]) -> None:
    """One pass over every value; `param` of an error is the top-level field it lies in."""
    todo = [(value, key, 1) for key, value in root.items()]
    _check_text(" ".join(root), None)
    while todo:
        value, field, depth = todo.pop()
        if isinstance(value, str):
            _check_text(value, field)
        elif isinstance(value, float | int):
            if not -MAX_INTEGER < value < MAX_INTEGER:
                raise bad_request(f"{field} holds a number that is out of range.", field)
        elif isinstance(value, dict | list):
            if depth >= MAX_DEPTH:
                raise bad_request(f"{field} is nested more than {MAX_DEPTH} levels deep.", field)
            if isinstance(value, dict):
                _check_text(" ".join(value), field)
                value = value.values()
            elif value and set(map(type, value)) == {int}:  # a prompt of token ids, perhaps very long
                value = min(value), max(value)
            todo.extend((item, field, depth + 1) for item in value)


def _check_text(text: str, field: str | None) -> None:
    if _LONE_SURROGATE.search(text):
        where = field or "A field name"
        raise bad_request(f"{where} holds half of a surrogate pair (\\ud800 to \\udfff); send whole characters.", field)


def validate(model: type[Model], payload: dict[str, Any]) -> Model:
    """`payload` as a `model`. Raises 400 naming the first field that does not fit."""
    try:
        return model.model_validate(payload)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(first["loc"])
    if first["type"] == "missing":
        raise bad_request(f"{param} is required.", param)
    raise bad_request(f"{param}: {first['msg'].removeprefix('Value error, ')}.".replace("..", "."), param)


def _path(location: tuple[str | int, ...]) -> str:
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _UNION_TAG.match(part):
            path += f".{part}"
    return path


async def read_model(request: Request, model: type[Model], max_bytes: int) -> Model:
    """The body of `request` as `model`; a large one is read in a thread, so that others are served meanwhile."""
    check_content_type(request)
    raw = await read_body(request, max_bytes)
    if len(raw) < LARGE_BODY:
        return _checked(model, raw)
    return await asyncio.to_thread(_checked, model, raw)


def _checked(model: type[Model], raw: bytes) -> Model:
    payload = parse_object(raw)
    check_limits(payload, len(raw))
    return validate(model, payload)
