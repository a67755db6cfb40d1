"""From the bytes of a request to a checked model: size, content type, JSON, depth, Unicode, numbers, then types.

Whatever is wrong is the client's fault and becomes a 4xx that names the field; nothing here can end in a 500.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from engine.server.body_values import MAX_DEPTH, NotFinite, check_values
from engine.server.errors import ApiError, bad_request
from engine.server.limits import check_limits, check_num_values

LARGE_BODY = 256 * 1024
PAUSE_SECONDS = 30.0  # between two chunks of a body
START_SECONDS = 60.0  # a body has this long, and more for each byte that has come:
SLOWEST_RATE = 10_000  # bytes a second
MAX_DIGITS = 100  # of an integer; anything near is out of range
_UNION_TAG = re.compile(r"^(str|int|float|bool|dict|list|none|constrained.*|function.*|.*\[.*)$")

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises 413 once it is known to pass `max_bytes`, however it is sent, and 408 once it pauses for
    more than PAUSE_SECONDS or takes more than `allowed_seconds`."""
    too_large = ApiError(413, f"The request body is larger than the limit of {max_bytes} bytes.", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise too_large
    chunks, size, clock = [], 0, asyncio.get_running_loop().time
    started, stream = clock(), request.stream()
    while True:
        try:
            async with asyncio.timeout_at(min(started + allowed_seconds(size), clock() + PAUSE_SECONDS)):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise _too_slow(size) from None
        if chunk is None:
            return b"".join(chunks)
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)


def allowed_seconds(size: int) -> float:
    """That a body may take once `size` bytes have come."""
    return START_SECONDS + size / SLOWEST_RATE


def _too_slow(size: int) -> ApiError:
    """The connection is closed: the rest of the body may still come, and is no request."""
    message = f"The request body stopped coming or came too slowly, after {size} bytes; send it again."
    return ApiError(408, message, code="request_timeout", headers={"connection": "close"})


def check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The content type is {kind or 'absent'}; send the header Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed request bodies are not supported; send the body as it is.")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises 400 for anything else, NaN, infinities, deep nesting and lone surrogates."""
    try:
        value = _read_json(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise bad_request("The body is not UTF-8 text.") from None
    except RecursionError:
        raise bad_request(f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    except json.JSONDecodeError as exc:
        raise bad_request(f"The body is not valid JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}.") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.")
    check_values(value)
    return value


def _read_json(text: str) -> Any:
    """What is no sane number is kept as such: `check_values` tells its place."""
    try:
        return json.loads(text, parse_constant=NotFinite)
    except json.JSONDecodeError:
        raise
    except ValueError:  # more digits than Python reads
        return json.loads(text, parse_constant=NotFinite, parse_int=_read_integer)


def _read_integer(digits: str) -> int | float:
    return int(digits) if len(digits) < MAX_DIGITS else math.inf


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
    check_num_values(raw)
    payload = parse_object(raw)
    check_limits(payload, len(raw))
    return validate(model, payload)
