"""What the clients read of an answer, however its bytes were cut, and of a server that refuses or breaks off."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.bench.serve_load import Clients, Load, read_answer, record_of
from engine.bench.traces import Session, Turn
from tests.engine.server.harness import emit, make_core, serving

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(value: dict) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def text_event(text: str) -> bytes:
    return event({"choices": [{"text": text, "token_ids": [7]}]})


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
ANSWER = HEAD + chunked(text_event("a"), text_event("b"), event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n")


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_an_answer_in_pieces(size):
    pieces = [(float(i), ANSWER[i : i + size]) for i in range(0, len(ANSWER), size)]
    record, token_ids = record_of(-1.0, pieces)
    assert (record.status, record.num_prompt, record.num_output, record.num_cached) == (200, 3, 2, 1)
    assert token_ids == [7, 7] and record.finished == pieces[-1][0] and record.ok
    ends = [ANSWER.index(text_event(t)) + len(text_event(t)) for t in "ab"]
    assert record.times == [(end - 1) // size * size for end in ends], "an event is there with its last byte"


def test_a_broken_answer_is_no_answer():
    assert read_answer([]) == (0, []) and read_answer([(0.0, b"HTTP/1.1 20")]) == (0, [])
    assert read_answer([(0.0, ANSWER[:-20])])[0] == 0
    plain = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"
    assert read_answer([(0.0, plain)]) == (429, [])
    failed = HEAD + chunked(text_event("a"), event({"error": {"message": "the engine has stopped"}}))
    assert record_of(0.0, [(1.0, failed)])[0].status == 500


def run(port: int, load: Load) -> list:
    return asyncio.run(asyncio.wait_for(Clients(port, load).run(), 20))


def test_closed_loop_against_a_server():
    script = emit("abcd")
    with serving(make_core(default_script=script)) as server:
        sessions = [Session([Turn([1, 2, 3], 4)]) for _ in range(7)]
        records = run(server.port, Load(sessions, concurrency=3))
        assert len(server.core.requests) == 7
    assert len(records) == 7 and all(r.ok and r.num_output == 4 and r.num_prompt == 3 for r in records)
    assert all(1 <= len(r.times) <= 4 and r.sent < r.times[0] <= r.finished for r in records)


def test_a_later_turn_has_the_answers_before_it_in_its_prompt():
    with serving(make_core(default_script=emit("xy"))) as server:
        records = run(server.port, Load([Session([Turn([1], 2), Turn([2], 2)])], concurrency=1))
        asked = [ids for _, ids, _ in server.core.requests]
    assert asked == [[1], [1, *emit("xy"), 2]] and [r.num_prompt for r in records] == [1, 4]


def test_open_loop_and_refusals():
    with serving(make_core()) as server:
        bad, fine = Session([Turn([999_999], 2), Turn([1], 2)]), Session([Turn([1], 2)])
        records = run(server.port, Load([bad, fine], arrivals=[0.0, 0.05]))
    assert [r.status for r in records] == [400, 200], "the turns after one that failed are not sent"
    assert records[1].sent - records[0].sent > 0.04
