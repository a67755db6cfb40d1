"""Clients that hang up, and an engine that dies, over real sockets."""

import json
import logging
import socket
import threading

import openai
import pytest

from tests.engine.server.harness import HI, emit, error_of, make_core, read_stream, request_bytes, serving

CHAT = "/v1/chat/completions"
ENDLESS = {"messages": HI, "prompt": "Hi", "max_tokens": 10**6, "ignore_eos": True}


@pytest.fixture(scope="module")
def slow():
    """A server whose core takes a step only when its gate is released."""
    core = make_core(max_model_len=10**6, default_script=[97] * 10**5, gate=threading.Semaphore(0))
    with serving(core) as running:
        yield running


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_hanging_up_frees_the_request(slow, path, stream, num_steps):
    core = slow.core
    core.aborted.clear()
    connections = []
    for i in range(4):
        connection = socket.create_connection(("127.0.0.1", slow.port))
        connection.sendall(request_bytes(path, ENDLESS | {"stream": stream, "n": 2}))
        connections.append(connection)
        core.wait_for(lambda i=i: len(core.running) == 2 * (i + 1))
    steps = core.num_steps
    for _ in range(num_steps):
        core.gate.release()
    core.wait_for(lambda: core.num_steps >= steps + num_steps)
    for connection in connections:
        connection.close()
    core.wait_for(lambda: len(core.aborted) == 4)
    assert not core.running and not slow.client._running


def test_hanging_up_in_the_middle_of_a_request_is_no_failure(caplog):
    with serving() as server:
        logger = logging.getLogger("turnout")
        logger.addHandler(caplog.handler)
        caplog.set_level(logging.INFO, "turnout")
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request_bytes(CHAT, ENDLESS)[:-20])
        connection.close()
        server.chat()
    logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert any("disconnected" in record.getMessage() for record in caplog.records)


def test_the_next_turn_right_after_hanging_up():
    with serving(make_core(max_model_len=10**5)) as server, server.http() as http:
        core = server.core
        for _ in range(50):
            core.scripts.append([97] * 50_000)
            with http.stream("POST", CHAT, json=ENDLESS | {"stream": True}) as response:
                next(response.iter_bytes())
            server_answer = http.post(CHAT, json={"messages": HI}).json()
            assert server_answer["choices"][0]["message"]["content"] == "answer"
        core.wait_for(lambda: len(core.aborted) == 50)
        assert not core.running and not server.client._running and not server.client._entering


def test_finished_requests_leave_nothing_behind():
    with serving() as server, server.http() as http:
        for i in range(100):
            assert http.post(CHAT, json={"messages": HI, "max_tokens": 1, "stream": i % 2 == 0}).status_code == 200
        assert not server.core.running and not server.core.aborted
        assert not server.client._running and not server.client._entering and not server.client._inbox


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_b089_failure_in_the_middle_of_a_stream():
    core = make_core(default_script=emit("abc" * 20), fail_at=4)
    with serving(core) as server:
        data = read_stream(server.post(CHAT, {"messages": HI, "stream": True}))
        *chunks, last = [json.loads(item) for item in data]
        assert all("error" not in chunk for chunk in chunks) and chunks
        assert last["error"]["code"] == "engine_dead" and "secret" not in json.dumps(last)
        with server.http() as http:
            assert error_of(http.get("/health"), 503) == last["error"]
            assert error_of(http.post(CHAT, json={"messages": HI, "stream": True}), 503) == last["error"]
        assert not server.client.is_healthy and "secret" in str(server.client.error)


def test_b089_the_sdk_raises_on_a_failing_stream_and_a_failing_answer():
    for stream in (False, True):
        with serving(make_core(default_script=emit("abc" * 20), fail_at=4)) as server:
            client = server.openai()
            with pytest.raises(openai.APIError) as caught:
                answer = client.chat.completions.create(model="tiny", messages=HI, stream=stream)
                for _ in answer:
                    pass
            assert caught.value.code == "engine_dead"
            assert stream or caught.value.status_code == 503


def test_shutdown_ends_running_streams():
    core = make_core(max_model_len=10**6, default_script=[97] * 10**5)
    with serving(core) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(request_bytes(CHAT, ENDLESS | {"stream": True}))
        core.wait_for(lambda: core.running)
        connection.close()
    assert core.is_shut_down
