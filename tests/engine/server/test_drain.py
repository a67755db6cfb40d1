"""A server that drains, in one process: who is let finish, what newcomers are told, and how what is left ends."""

import asyncio
import json
import socket
import threading
import time

import pytest

from tests.engine.server.harness import HI, emit, error_of, make_core, read_stream, request_bytes, serving
from tests.processes import until

CHAT = "/v1/chat/completions"


@pytest.fixture
def gated():
    """A server whose core takes a step only when its gate is released, and the loop it runs in."""
    core = make_core(default_script=emit("abc" * 5), gate=threading.Semaphore(0))
    with serving(core) as server:
        yield server
        core.gate.release(10**4)


def begin(server) -> None:
    server.drain.begin()


def finish(server, timeout: float) -> float:
    """Seconds until the drain says that nothing is left."""
    began = time.monotonic()
    asyncio.run(server.drain.finish(timeout))
    return time.monotonic() - began


def asking(server, answers: list, **fields) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(server.post(CHAT, {"messages": HI} | fields)))
    thread.start()
    return thread


def test_accepted_calls_finish_and_new_ones_go_elsewhere(gated):
    answers = []
    with gated.http() as kept:
        assert kept.get("/health").status_code == 200
        calls = [asking(gated, answers, stream=stream) for stream in (False, True)]
        gated.core.wait_for(lambda: len(gated.core.running) == 2)
        begin(gated)
        for http in (kept, gated.http()):
            refused = http.post(CHAT, json={"messages": HI})
            assert error_of(refused, 503)["code"] == "draining"
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
            assert error_of(http.get("/health"), 503)["code"] == "draining"
            assert http.get("/load").json()["is_draining"] is True
        assert finish(gated, 0.1) >= 0.1, "two calls run"
        assert gated.drain.num_calls in (0, 2)
    for call in calls:
        call.join(20)
    assert gated.client.rejected["draining"] == 2, "probes are not counted"


def test_it_ends_when_the_last_call_does(gated):
    answers = []
    call = asking(gated, answers)
    gated.core.wait_for(lambda: gated.core.running)
    begin(gated)
    threading.Timer(0.2, gated.core.gate.release, args=(10**4,)).start()
    assert finish(gated, 30) < 20
    call.join(20)
    assert answers[0].json()["choices"][0]["finish_reason"] == "stop"
    assert finish(gated, 30) < 1, "idle"


def test_what_is_left_ends_with_an_error(gated):
    """Streams with an event, once they have sent something; others with a status."""
    answers = []
    calls = [asking(gated, answers, stream=stream) for stream in (True, False)]
    gated.core.wait_for(lambda: len(gated.core.running) == 2)
    before = gated.core.num_steps
    gated.core.gate.release(3)
    gated.core.wait_for(lambda: gated.core.num_steps >= before + 3)
    begin(gated)
    finish(gated, 0.05)
    for call in calls:
        call.join(20)
    whole, streamed = sorted(answers, key=lambda answer: answer.status_code == 200)
    assert error_of(whole, 503)["code"] == "shutting_down"
    *chunks, last = map(json.loads, read_stream(streamed))
    assert chunks and last["error"]["code"] == "shutting_down"
    assert len(gated.core.aborted) == 2 and not gated.core.running and not gated.client._running


def test_a_call_that_arrives_late_is_refused_once_time_is_up(gated):
    """Its head came before the drain, its body after the end of it."""
    raw = request_bytes(CHAT, {"messages": HI})
    late = socket.create_connection(("127.0.0.1", gated.port))
    late.sendall(raw[:-5])
    until(lambda: gated.drain.num_calls == 1, 10, "the call is known")
    begin(gated)
    ended = threading.Thread(target=finish, args=(gated, 0.05))
    ended.start()
    until(lambda: gated.client._refusal is not None, 10, "time is up")
    late.sendall(raw[-5:])
    assert b" 503 " in late.recv(4000).split(b"\r\n")[0]
    ended.join(20)
    assert gated.drain.num_calls == 0
