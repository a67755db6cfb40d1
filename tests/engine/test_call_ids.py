"""Calls of the history in Kimi's form: foreign ids renamed, results with them, the next number."""

from __future__ import annotations

import pytest

from engine.call_ids import call_number, next_call_number
from engine.chat_messages import prepare_messages
from engine.errors import InvalidRequestError


def turn(*calls: tuple[str, str]) -> dict:
    made = [{"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}} for i, name in calls]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


def ids(messages: list[dict]) -> list[str]:
    """Of calls and results, in order."""
    found = []
    for message in messages:
        found += [call["id"] for call in message.get("tool_calls") or ()]
        found += [message["tool_call_id"]] if "tool_call_id" in message else []
    return found


USER = {"role": "user", "content": "Hi"}
F0, F1 = ("functions.f:0", "f"), ("functions.f:1", "f")


@pytest.mark.parametrize(
    ("messages", "expected", "following"),
    [
        ([USER], [], 0),
        ([turn(F0), result(F0[0]), turn(F1), result(F1[0])], [F0[0], F0[0], F1[0], F1[0]], 2),
        # Kimi's form stays, also where another server has counted badly.
        ([turn(F0), result(F0[0]), turn(F0), result(F0[0])], [F0[0]] * 4, 2),
        ([turn(("functions.f:7", "f"))], ["functions.f:7"], 8),
        # Foreign ids; a client may use one again in a later turn, or twice in one.
        ([turn(("call_x", "f"), ("call_y", "g")), result("call_y"), result("call_x")],
         ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0"], 2),
        ([turn(("c", "f")), result("c"), turn(("c", "g")), result("c")],
         ["functions.f:0", "functions.f:0", "functions.g:1", "functions.g:1"], 2),
        ([turn(("", "f"), ("", "g")), result(""), result(""), result("")],
         ["functions.f:0", "functions.g:1", "functions.f:0", "functions.g:1", "functions.g:1"], 2),
        # A foreign call before, between and behind ours never takes a number in use.
        ([turn(("x", "f")), turn(F1), turn(("y", "f"))], ["functions.f:0", "functions.f:1", "functions.f:2"], 3),
        ([turn(F1), turn(("x", "f"))], ["functions.f:1", "functions.f:2"], 3),
        ([turn(F0), turn(("x", "f"))], ["functions.f:0", "functions.f:1"], 2),
        ([turn(("x", "f")), turn(F0), turn(("y", "f"))], ["functions.f:1", "functions.f:0", "functions.f:2"], 3),
        # Near Kimi's form, but of another name, or no number that counts.
        ([turn(("functions.g:0", "f"))], ["functions.f:0"], 1),
        ([turn(("f:0", "f"), ("functions.f:01", "f"), ("functions.f:", "f"), (f"functions.f:{'9' * 16}", "f"))],
         [f"functions.f:{n}" for n in range(4)], 4),
        ([turn(("functions.x:y:3", "x:y"))], ["functions.x:y:3"], 4),
        # A result without its call keeps its id.
        ([result("lost"), turn(("lost", "f"))], ["lost", "functions.f:0"], 1),
    ],
)  # fmt: skip
def test_b001_ids_of_the_history_count_over_the_conversation(messages, expected, following):
    before = ids(messages)
    prepared = prepare_messages(messages)
    assert ids(prepared) == expected and ids(messages) == before
    assert next_call_number(messages) == next_call_number(prepared) == following
    assert f"functions.f:{next_call_number(messages)}" not in expected


def test_renaming_changes_nothing_but_ids_and_repeats_itself():
    """A history grows by turns: what was rendered before must be rendered again."""
    history = [turn(("a", "f")), result("a"), turn(("functions.f:1", "f")), result("functions.f:1"), turn(("b", "f"))]
    for size in range(1, len(history) + 1):
        prepared = prepare_messages(history[:size])
        assert ids(prepared) == ids(prepare_messages(history))[: len(ids(prepared))]
        assert prepare_messages(prepared) == prepared


@pytest.mark.timeout(20)
def test_long_histories_take_linear_time():
    messages = [turn(*((f"call_{i}", "f") for i in range(1000))), *(result(f"call_{i}") for i in range(1000))] * 20
    prepared = prepare_messages(messages)
    assert next_call_number(prepared) == 20_000 and len(set(ids(prepared))) == 20_000


def test_a_call_without_an_id_is_refused_before_it_is_renamed():
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].tool_calls\[0\].id"):
        prepare_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
    assert call_number("functions.f:0", "f") == 0 and call_number("functions.f:²", "f") is None


@pytest.mark.parametrize("calls", [5, "x", [5], [{}], [{"id": "a", "function": {"name": "f"}}]])
def test_what_others_than_assistants_send_as_calls_does_not_count(calls):
    messages = [USER | {"tool_calls": calls}, turn(F0), result(F0[0]) | {"tool_calls": calls}]
    assert next_call_number(messages) == next_call_number(prepare_messages(messages)) == 1
