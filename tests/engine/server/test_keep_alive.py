"""Streams that have nothing to send for a while: comments keep the line alive, and what errors look like after one."""

import contextlib
import json
import threading

import openai
import pytest

from tests.engine.server.harness import HI, emit, error_of, make_core, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": HI, "stream": True}, COMPLETIONS: {"prompt": "a", "stream": True}}
COMMENT = ": keep-alive"


@contextlib.contextmanager
def gated(seconds: float, **options):
    """A server whose core takes a step only when its gate is released."""
    core = make_core(default_script=emit("abc" * 5), gate=threading.Semaphore(0), **options)
    with serving(core, sse_keep_alive=seconds) as server:
        yield server
        core.gate.release(10**4)


@contextlib.contextmanager
def lines_of(server, path: str, **fields):
    """The non-empty lines of a stream, as they come."""
    with server.http() as http, http.stream("POST", path, json=BODIES[path] | fields) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        yield (line for line in response.iter_lines() if line)


def comments(lines, count: int) -> None:
    for _ in range(count):
        assert next(lines) == COMMENT


def text_of(lines: list[str]) -> str:
    """However it was cut into chunks: reasoning, which a chat's deltas give under two names, or a completion's text."""
    choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("reasoning") or "" for choice in choices)


@pytest.mark.parametrize("path", BODIES)
def test_b049_a_stream_that_waits_is_kept_alive(path):
    """Before the first token and in the middle, as where long arguments are held back; what is sent stays the same."""
    with gated(0.03) as server:
        with lines_of(server, path) as lines:
            comments(lines, 3)
            server.core.gate.release(3)
            seen = [line for line in (next(lines) for _ in range(20)) if line != COMMENT]
            server.core.gate.release(10**4)
            seen += [line for line in lines if line != COMMENT]
        with lines_of(server, path) as lines:
            expected = [line for line in lines if line != COMMENT]
        assert all(line.startswith("data: ") for line in seen) and seen[-1] == expected[-1] == "data: [DONE]"
        assert text_of(seen) == text_of(expected) != ""
        server.core.wait_for(lambda: not server.core.running)


def test_b049_no_comment_while_events_flow_or_when_off():
    for seconds in (0, 60):
        core = make_core(default_script=emit("abc" * 30))
        with serving(core, sse_keep_alive=seconds) as server, lines_of(server, CHAT) as lines:
            assert not any(line.startswith(":") for line in lines)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("path", BODIES)
def test_b089_an_error_after_a_comment_is_an_event_before_it_a_status(path):
    with gated(0.03, fail_at=1) as server:
        with lines_of(server, path) as lines:
            comments(lines, 1)
            server.core.gate.release(1)
            rest = [line for line in lines if line != COMMENT]
        assert len(rest) == 1 and json.loads(rest[0][6:])["error"]["code"] == "engine_dead", "and no [DONE]"
    with gated(60, fail_at=1) as server:
        server.core.gate.release(1)
        assert error_of(server.post(path, BODIES[path]), 503)["code"] == "engine_dead"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fail_at", [1, 4])
def test_b089_the_sdk_reads_past_comments_and_raises_at_the_error(fail_at):
    with gated(0.03, fail_at=fail_at) as server:
        client, chunks = server.openai(), []
        with client.chat.completions.create(model="tiny", messages=HI, stream=True) as stream:
            # The headers have come, and with them nothing but a comment.
            server.core.gate.release(10**4)
            with pytest.raises(openai.APIError) as caught:
                for chunk in stream:
                    chunks.append(chunk)
        assert caught.value.code == "engine_dead" and "secret" not in str(caught.value)
        assert bool(chunks) == (fail_at > 1) and all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_the_sdk_reads_past_comments():
    with gated(0.03) as server:
        stream = server.openai().completions.create(model="tiny", prompt="a", stream=True)
        server.core.gate.release(10**4)
        assert "".join(chunk.choices[0].text for chunk in stream) == "abc" * 5


def test_a_client_that_leaves_between_comments_frees_its_place():
    with gated(0.03) as server:
        with lines_of(server, CHAT) as lines:
            comments(lines, 2)
        server.core.wait_for(lambda: server.core.aborted)
        assert not server.core.running
        with server.http() as http:
            assert http.get("/health").status_code == 200


def test_refusals_keep_their_status_however_short_the_interval():
    """What is wrong with a request is found before any waiting begins."""
    with gated(0.001) as server:
        for path, body in BODIES.items():
            assert server.refusal(path, body | {"temperature": 9})["param"] == "temperature"
            long = {"messages": [{"role": "user", "content": "x" * 400}]} if path == CHAT else {"prompt": "x" * 400}
            assert server.refusal(path, body | long)["code"] == "context_length_exceeded"
