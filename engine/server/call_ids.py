"""What a call is known by: the id of its answer, and the id that its sender gave the call, if it gave one.

The sender's comes in the header `X-Request-Id` or the body's `request_id`. It goes back in the header, stands in the
access log beside the answer's id, and either of them ends the call with /abort_request.
"""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from engine.server.errors import bad_request
from engine.server.protocol import REQUEST_ID

CALL_ID = "turnout.call_id"  # keys in the ASGI scope
ANSWER_ID = "turnout.answer_id"
_IS_MADE_UP = "turnout.call_id_is_made_up"
_HEADER_ID = r"[A-Za-z0-9_.:/+=@\-]{1,128}"


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def name_call(scope: Scope) -> None:
    """Takes the header's id if it is a sane one, else makes one up."""
    given = Headers(scope=scope).get("x-request-id", "")
    scope[_IS_MADE_UP] = not re.fullmatch(_HEADER_ID, given)
    scope[CALL_ID] = new_id("req") if scope[_IS_MADE_UP] else given


class AnswerNames(NamedTuple):
    """`own` is unique, the engine goes by it; `shown` is the answer's id, the sender's if it gave one in the body;
    `known_by` are the ids that end the call."""

    own: str
    shown: str
    known_by: frozenset[str]


def name_answer(request: Request, prefix: str, body_id: str | None) -> AnswerNames:
    """Where the header has no id, the body's is the call's.

    Raises 400 for a `request_id` that does not fit into a log line.
    """
    scope = request.scope
    own = scope[ANSWER_ID] = new_id(prefix)
    if body_id is not None:
        if not re.fullmatch(REQUEST_ID, body_id):
            raise bad_request("request_id must be 1 to 128 letters, digits and _ . : -", "request_id")
        scope[ANSWER_ID] = f"{prefix}-{body_id}"
        if scope[_IS_MADE_UP]:
            scope[CALL_ID] = body_id
    known_by = frozenset(filter(None, (own, scope[ANSWER_ID], scope[CALL_ID], body_id)))
    return AnswerNames(own, scope[ANSWER_ID], known_by)
