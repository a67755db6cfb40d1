"""Bodies that hold too much, what they must not hold, or that never end."""

import asyncio
import json
import socket

import pytest
from fastapi import Request

from engine.server import body
from engine.server.body import parse_object, read_body
from engine.server.body_values import MAX_DEPTH
from engine.server.errors import ApiError
from engine.server.limits import MAX_VALUES, check_num_values
from tests.engine.server.harness import HI, error_of

CHAT = "/v1/chat/completions"
SURROGATE = '"\\ud800"'


@pytest.mark.parametrize("values", ["{}," * MAX_VALUES, "1," * MAX_VALUES, "[[]]," * (MAX_VALUES // 3)])
def test_too_many_values_are_refused_before_they_are_read(server, values, monkeypatch):
    monkeypatch.setattr(body, "parse_object", lambda raw: pytest.fail("read"))
    with server.http(headers={"content-type": "application/json"}) as http:
        error = error_of(http.post(CHAT, content=f'{{"x": [{values}0]}}'), 400)
    assert error["code"] == "limit_exceeded" and str(MAX_VALUES) in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"x": "' + b"[,{" * MAX_VALUES + b'", "y": "\\\\"}',
        b'{"x": "\\"' + b',\\"' * (MAX_VALUES + 1) + b'"}',
        b'"' + b'\\",' * (MAX_VALUES + 1),  # without an end, read once and not once for each quote
        b"[" + b"1," * (MAX_VALUES - 3) + b"1]",
    ],
    ids=["punctuation", "quotes", "no end", "just enough"],
)
def test_only_values_count(raw):
    assert check_num_values(raw) is None


@pytest.mark.parametrize(
    "raw, param",
    [
        ('{"a": NaN}', "a"),
        ('{"m": [{"x": [0, {"b": 1}, {"c": [1, -Infinity]}]}]}', "m[0].x[2].c[1]"),
        ('{"a": [[], {}, 1e999], "b": NaN}', "a[2]"),
        ('{"bias": {"5": 1, "6": 18446744073709551616}}', "bias.6"),
        ('{"a": 1, "b": [[1], [-' + "9" * 5000 + "]]}", "b[1][0]"),
        ('{"a": {"' + "k" * 1000 + '": NaN}}', "a." + "k" * 198),
        ('{"a": [1, ' + SURROGATE + "]}", "a"),
        ('{"a": [{' + SURROGATE + ": NaN}]}", "a"),
        ("{" + SURROGATE + ": 1}", None),
        ('{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "a"),
        ("NaN", None),
    ],
)
def test_what_a_body_must_not_hold_is_refused_by_its_place(raw, param):
    with pytest.raises(ApiError) as caught:
        parse_object(raw.encode())
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 300 and caught.value.message.encode()


def test_as_deep_and_as_large_as_is_allowed():
    raw = '{"a": ' + "[" * (MAX_DEPTH - 1) + "18446744073709551615, true, null" + "]" * (MAX_DEPTH - 1) + "}"
    assert parse_object(raw.encode()) == json.loads(raw)


def request_of(*chunks, ends=True, pause=0.0):
    """A request whose body comes in `chunks`, and then ends or never does."""
    waiting = list(chunks)

    async def receive():
        await asyncio.sleep(pause)
        if not waiting:
            await asyncio.Event().wait()
        chunk = waiting.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(waiting) or not ends}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def read(request):
    return asyncio.run(read_body(request, 10**6))


def test_a_body_that_pauses_too_long_is_given_up(monkeypatch):
    assert read(request_of(b"ab", b"", b"c")) == b"abc"
    monkeypatch.setattr(body, "PAUSE_SECONDS", 0.01)
    with pytest.raises(ApiError) as caught:
        read(request_of(b"ab", ends=False))
    error = caught.value
    assert (error.status, error.code, error.headers) == (408, "request_timeout", {"connection": "close"})


def test_a_body_that_trickles_is_given_up(monkeypatch):
    """No chunk is late, but together they are: the time allowed grows with what has come, and less than this."""
    monkeypatch.setattr(body, "START_SECONDS", 0.05)
    with pytest.raises(ApiError, match="too slowly"):
        read(request_of(*[b"a"] * 1000, pause=0.001))
    assert body.allowed_seconds(8 * 2**20) - body.allowed_seconds(0) == pytest.approx(839, abs=1)


def test_a_client_that_stops_in_its_body_is_answered_and_its_connection_closed(server, monkeypatch):
    monkeypatch.setattr(body, "PAUSE_SECONDS", 0.01)
    half = json.dumps({"messages": HI})[:-5]
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as peer:
        peer.sendall((head + half).encode())
        answer = peer.makefile("rb").read()  # to the end of the connection
    status, _, rest = answer.partition(b"\r\n")
    assert status.split()[1] == b"408" and b"connection: close" in rest.lower()
    assert json.loads(rest.split(b"\r\n\r\n")[1])["error"]["code"] == "request_timeout"
    assert not server.core.requests
