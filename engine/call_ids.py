"""Ids of tool calls in Kimi's form, `functions.NAME:n`, where n counts the calls of a conversation from 0.

The model reads the function's name and the count from the id alone, so ids that another server gave out are renamed in
the prompt, and the results with their calls. Ids in Kimi's form stay as they are, also where they repeat a number.
"""

from __future__ import annotations

from collections import deque
from typing import Any

NAMESPACE = "functions."
MAX_DIGITS = 15


def call_id(name: str, number: int) -> str:
    return f"{NAMESPACE}{name}:{number}"


def call_number(given: str, name: str) -> int | None:
    """The number of an id in Kimi's form for a call of `name`, None for any other id."""
    head, colon, digits = given.rpartition(":")
    if head != f"{NAMESPACE}{name}" or not colon or len(digits) > MAX_DIGITS:
        return None
    if not (digits.isascii() and digits.isdigit()) or (digits[0] == "0" and digits != "0"):
        return None
    return int(digits)


def next_call_number(messages: list[dict[str, Any]]) -> int:
    """What the id of the conversation's next call counts on from: larger than any number so far, and at least the
    number of calls so far. `messages` are a caller's, once `prepare_messages` has taken them, or what it returned."""
    numbers = _numbers(messages)
    return max(len(numbers), 1 + max(numbers, default=-1))


def rename_calls(messages: list[dict[str, Any]]) -> None:
    """Gives every call with a foreign id one in Kimi's form, in place; a result follows the latest call of its id.

    Where several calls of one message share an id, their results follow them in order.
    """
    numbers = iter(_numbers(messages))
    ids: dict[str, deque[str]] = {}
    for message in messages:
        known: set[str] = set()
        for call in message.get("tool_calls") or ():
            given, call["id"] = call["id"], call_id(call["function"]["name"], next(numbers))
            if given not in known:
                known.add(given)
                ids[given] = deque()
            ids[given].append(call["id"])
        waiting = ids.get(message.get("tool_call_id"))
        if waiting:
            message["tool_call_id"] = waiting.popleft() if len(waiting) > 1 else waiting[0]


def _numbers(messages: list[dict[str, Any]]) -> list[int]:
    """The number of each call: its own in Kimi's form, else its place among the conversation's calls, or the next that
    no other call has. Only an assistant calls: what others send under that name has not been looked at."""
    calls = [call for message in messages if message["role"] == "assistant" for call in message.get("tool_calls") or ()]
    given = [call_number(call["id"], call["function"]["name"]) for call in calls]
    taken, numbers, free = set(given), [], 0
    for place, number in enumerate(given):
        if number is None:
            free = max(free, place)
            while free in taken:
                free += 1
            number = free
            free += 1
        numbers.append(number)
    return numbers
