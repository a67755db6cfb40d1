"""The server before and after its engine stands: one socket, no call lost, the same rules of who may ask."""

from __future__ import annotations

import signal
import socket
import threading
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest

from engine.loading.progress import CHECKING, LoadProgress, Share, Snapshot
from engine.server import responses
from engine.server.app import create_app
from engine.server.client import EngineClient
from engine.server.http_thread import Server
from engine.server.loading import Gate, answer
from tests.engine.server.harness import HI, check, error_of, make_core

PAGE = "https://chat.example.com"
KEY = {"authorization": "Bearer right"}
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def same_signals():
    """A server that opens takes them over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def loading(**options):
    """(the server, a client of it, `stand`: its engine stands)."""
    gate, listener = Gate(LoadProgress().snapshot, **options), socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with Server(gate, listener, drain_timeout=1, log_level="warning") as server:
        client = EngineClient(make_core())

        def stand() -> None:
            server.open(create_app(client, served_model_names=["tiny"], **options), lambda: None)

        with httpx.Client(base_url=url, timeout=20, trust_env=False) as http:
            yield server, http, stand
        client.close()


def test_every_route_is_refused_in_the_same_form():
    with loading() as (_, http, _):
        for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/"), ("DELETE", "/no/such/route")):
            refused = http.request(method, path, content=b"x" * 100_000)
            assert error_of(refused, 503)["code"] == "loading" and refused.headers["retry-after"] == "5"
        probe = http.get("/health")
        assert check(responses.Loading, probe.json())["progress"]["phase"] == CHECKING
        assert probe.json()["error"]["message"] == "This server is loading: checking files."
        head = http.head("/health")
        assert (head.status_code, head.content, head.headers["x-request-id"][:4]) == (503, b"", "req-")


def test_keys_and_origins_hold_as_they_will():
    with loading(api_keys=["right"], allow_origins=[PAGE]) as (_, http, _):
        assert error_of(http.get("/v1/models"), 401)
        assert error_of(http.post("/health"), 401), "open to reading only"
        assert error_of(http.get("/v1/models", headers=KEY), 503)
        probe = http.get("/health", headers={"origin": PAGE})
        assert probe.status_code == 503 and probe.headers["access-control-allow-origin"] == PAGE
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        assert http.options(CHAT, headers=asked).status_code == 200


def test_no_connection_is_lost_when_the_engine_stands():
    """Some are kept, some are new with each call; each call gets 503 until one is answered, and 200 from then on."""
    with loading() as (_, http, stand):
        waiting = socket.create_connection((http.base_url.host, http.base_url.port), timeout=20)
        seen, enough = Counter(), threading.Barrier(5)

        def ask(keeps: bool) -> None:
            with httpx.Client(base_url=http.base_url, timeout=20, trust_env=False) as own:
                own.headers["connection"] = "keep-alive" if keeps else "close"
                answers = [own.get("/health").status_code]
                enough.wait(20)
                while answers[-1] == 503:
                    answers.append(own.get("/health").status_code)
                answers += [own.get("/health").status_code for _ in range(3)]
            seen.update(answers)

        threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(4)]
        for thread in threads:
            thread.start()
        enough.wait(20)
        stand()
        for thread in threads:
            thread.join(20)
        assert set(seen) == {503, 200} and seen[200] == 16
        with waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert waiting.makefile("rb").read().startswith(b"HTTP/1.1 200"), "it connected while the engine loaded"
        assert http.post(CHAT, json={"messages": HI}).status_code == 200


def test_a_start_that_fails_leaves_no_thread_and_no_listener():
    with pytest.raises(ValueError, match="damaged"), loading() as (_, http, _):
        assert http.get("/health").status_code == 503
        raise ValueError("damaged")
    assert "http" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{http.base_url}/health", trust_env=False)


def test_the_first_signal_drains_and_the_server_ends():
    with loading() as (server, http, stand):
        stand()
        assert http.get("/health").status_code == 200
        signal.raise_signal(signal.SIGTERM)
        server.wait()
        with pytest.raises(httpx.TransportError):
            http.get("/health")


@pytest.mark.parametrize(
    ("done", "wait"), [(0, "5"), (50, "10"), (99, "1"), (1, "60"), (100, "5")], ids=lambda value: str(value)
)
def test_retry_after_is_the_time_that_is_left(done, wait):
    shot = Snapshot("reading weights", (Share(done, 100),), 10.0, (0.0,))
    assert answer(shot, is_probe=False).headers["retry-after"] == wait
