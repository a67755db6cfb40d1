"""serve.py as a process: every way to start it, how it ends, and what a lost rank leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

import serve
from tests.checkpoints import SMALL, build_checkpoint
from tests.processes import PYTHON, TORCHRUN, Program, serving, until

QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
TWO_RANKS = ("--tp", "2", "--ep", "2")
LAUNCHERS = {
    "plain": (PYTHON, ()),
    "python": (PYTHON, TWO_RANKS),
    "torchrun": (TORCHRUN, TWO_RANKS),
    "torchrun_2": ([*TORCHRUN, "--nproc-per-node", "2"], TWO_RANKS),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return str(build_checkpoint(tmp_path_factory.mktemp("small"), SMALL))


def ask(port: int, **options) -> str:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24, **options)
    message = answer.choices[0].message
    return f"{message.model_extra.get('reasoning_content')}|{message.content}"


@pytest.fixture(scope="module")
def expected_answer() -> str:
    """What the same greedy request gives in process."""
    from engine import LLM, SamplingParams

    llm = LLM(device="cpu", num_threads=1)
    return llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("plain", signal.SIGINT),
        ("python", signal.SIGTERM),
        ("torchrun", signal.SIGTERM),
        ("torchrun_2", signal.SIGINT),
        pytest.param("python", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torchrun", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("torchrun_2", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_each_way_to_start_answers_and_ends(name, number, tmp_path, expected_answer):
    """Greedy text is the same everywhere; SIGINT and SIGTERM end all ranks within 5 s."""
    launcher, options = LAUNCHERS[name]
    with serving(launcher, tmp_path, *options) as (program, port):
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        assert ask(port).replace("|", "").split() == expected_answer.replace("</think>", "").split()
        assert len(program.find("engine.worker")) == (name in ("python", "torchrun"))
        program.signal(number)
        code = program.ends(5)
        # torchrun itself exits with 1 after SIGTERM or SIGINT, whatever its ranks gave.
        assert code == (0 if launcher is PYTHON else 1), program.output
        assert "Traceback" not in program.output or launcher is not PYTHON, program.output


def test_a_draft_changes_no_word_and_is_counted(tmp_path, expected_answer):
    with serving(PYTHON, tmp_path, "--draft", "auto") as (_, port):
        body = {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    message, usage = answer["choices"][0]["message"], answer["usage"]
    text = (message["reasoning_content"] or "") + (message["content"] or "")
    assert text.split() == expected_answer.replace("</think>", "").split()
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 < accepted < usage["completion_tokens"]
    assert f"turnout_spec_decode_num_accepted_tokens_total {accepted:.1f}" in metrics.splitlines()
    assert 'turnout_spec_decode_choice_info{bucket="1",num_drafts=' in metrics


def test_a_later_draft_option_wins_and_none_is_none():
    """`make serve` gives --draft auto before what ARGS holds."""
    assert serve.parse_arguments(["--draft", "auto", "--draft", "none"]).draft is None
    assert serve.parse_arguments(["--draft", "auto", "--draft", "a/draft"]).draft == "a/draft"


def start_stream(port: int, max_tokens: int) -> httpx.Response:
    """A stream whose first event has come."""
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": "The", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    response = client.send(client.build_request("POST", "/v1/completions", json=body), stream=True)
    assert response.status_code == 200
    response.lines = response.iter_lines()
    next(response.lines)
    return response


def rest_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.lines if line]


def drains(port: int) -> bool:
    """Readiness is off, and the port still answers."""
    return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503


def test_sigterm_lets_accepted_answers_finish(small, tmp_path):
    """B169: running ones and one that waits; new calls get 503, on an old connection and on a new one."""
    limits = ("--max-num-seqs", "5", "--max-model-len", "512", "--drain-timeout", "60")
    with serving(PYTHON, tmp_path, "--model", small, *limits) as (program, port):
        kept = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        body = {"prompt": "The", "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        streams = [start_stream(port, 400) for _ in range(5)]
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(httpx.post, f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
            until(lambda: kept.get("/load").json()["num_requests_waiting"], 20, "the sixth waits")
            program.signal(signal.SIGTERM)
            until(lambda: drains(port), 20, "readiness is off")
            for client in (kept, httpx):
                refused = client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
                assert refused.headers["connection"] == "close" and refused.headers["retry-after"] == "1"
            assert 'request_rejected_total{reason="draining"} 2.0' in kept.get("/metrics").text
            for stream in streams:
                *chunks, last = rest_of(stream)
                assert last == "[DONE]"
                assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
            assert waits.result().json()["choices"][0]["finish_reason"] == "length"
        assert program.ends() == 0, program.output


def test_what_outlasts_the_drain_ends_with_an_error(small, tmp_path):
    with serving(PYTHON, tmp_path, "--model", small, "--drain-timeout", "0.3") as (program, port):
        stream = start_stream(port, 4000)
        program.signal(signal.SIGTERM)
        assert json.loads(rest_of(stream)[-1])["error"]["code"] == "shutting_down"
        assert program.ends() == 0, program.output
        assert "Traceback" not in program.output, program.output


def test_a_body_that_never_comes_does_not_hold_up_the_end(small, tmp_path):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
    with serving(PYTHON, tmp_path, "--model", small, "--drain-timeout", "60") as (program, port):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
            slow.sendall(head + b'{"prom')
            until(lambda: httpx.get(f"http://127.0.0.1:{port}/load").status_code == 200, 20, "it answers others")
            program.signal(signal.SIGTERM)
            answer = slow.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 503") and b'"draining"' in answer, answer
        assert program.ends() == 0, program.output
        assert "Traceback" not in program.output, program.output


@pytest.mark.parametrize("launcher", [PYTHON, TORCHRUN], ids=["python", "torchrun"])
def test_a_second_signal_ends_a_running_stream_at_once(small, tmp_path, launcher):
    with serving(launcher, tmp_path, "--model", small, *TWO_RANKS) as (program, port):
        stream = start_stream(port, 4000)
        (rank_0,) = [p for p in program.find("serve.py") if p != program.process.pid] or [program.process.pid]
        os.kill(rank_0, signal.SIGTERM)
        until(lambda: drains(port), 20, "the first signal has been seen")
        os.kill(rank_0, signal.SIGTERM)
        assert program.ends() != 0
        with pytest.raises(httpx.TransportError):
            rest_of(stream)


@pytest.mark.parametrize("moment", [pytest.param("idle", marks=pytest.mark.slow), "stream", "start"])
def test_sigkill_of_rank_0_leaves_no_worker(small, tmp_path, moment):
    if moment == "start":
        command = [*PYTHON, "serve.py", "--port", "0", "--model", small, *TWO_RANKS]
        program = Program(command, tmp_path)
        try:
            until(lambda: program.find("engine.worker"), 60, "a worker has been started")
            program.signal(signal.SIGKILL)
            program.ends()
        finally:
            program.kill()
        return
    with serving(PYTHON, tmp_path, "--model", small, *TWO_RANKS) as (program, port):
        if moment == "stream":
            start_stream(port, 4000)
        program.signal(signal.SIGKILL)
        assert program.ends() == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["idle", "stream"])
def test_sigkill_of_a_worker_ends_the_server_with_the_reason(small, tmp_path, moment):
    with serving(PYTHON, tmp_path, "--model", small, "--tp", "2") as (program, port):
        stream = start_stream(port, 4000) if moment == "stream" else None
        (worker,) = program.find("engine.worker")
        os.kill(worker, signal.SIGKILL)
        if stream is not None:
            assert "error" in json.loads(next(x for x in rest_of(stream) if "error" in x))
        assert program.ends() == 1, program.output
        assert "rank 1" in program.output and "Traceback" not in program.output, program.output


def test_b178_only_the_http_port_is_public_and_nothing_is_unpickled(small, tmp_path):
    """Every socket on which a rank listens is on loopback. Junk, frames that promise gigabytes and a pickle that makes
    a file go to each; the ranks live on and answer."""
    marker = tmp_path / "made"
    raw = pickle.dumps(Marker(str(marker)))
    with serving(PYTHON, tmp_path, "--model", small, *TWO_RANKS) as (program, port):
        listening = [address for pid in program.commands() for address in listening_sockets(pid)]
        assert ("127.0.0.1", port) in listening
        public = [f"{host}:{p}" for host, p in listening if not host.startswith("127.") and host != "::1"]
        for host, other in listening:
            for junk in (
                raw,
                struct.pack("!I", len(raw)) + raw,
                b"\xff" * 4096,
                b"\0" * 200,
                b"GET / HTTP/1.1\r\n\r\n",
            ):
                send_junk(host, other, junk)
        assert ask_health(port) == 200 and len(program.find("engine.worker")) == 1
        assert start_stream(port, 4).status_code == 200
        assert public == [] and len(listening) > 1 and not marker.exists(), listening


def ask_health(port: int) -> int:
    return httpx.get(f"http://127.0.0.1:{port}/health").status_code


class Marker:
    """Unpickling it makes a file."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def send_junk(host: str, port: int, junk: bytes) -> None:
    peer = socket.create_connection(("127.0.0.1" if host == "0.0.0.0" else host, port), timeout=5)
    with peer, contextlib.suppress(OSError):  # it may hang up before all is sent, or never answer
        peer.sendall(junk)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(0.3)
        peer.recv(1000)


def listening_sockets(pid: int) -> list[tuple[str, int]]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except OSError:
            continue
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                raw = bytes.fromhex(host)
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.append((socket.inet_ntop(family, words), int(port, 16)))
    return found


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_servers_that_take_a_port_together_one_gets_it(monkeypatch, is_first):
    """Both may take the address before one of them listens; the one that listens later hears of it at once."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if is_first:
            with serve._bind("127.0.0.1", port), pytest.raises(OSError, match="in use"):
                other.listen()
            return
        bind = socket.socket.bind

        class Late(socket.socket):
            def bind(self, address):
                bind(self, address)
                other.listen()

        monkeypatch.setattr(serve.socket, "socket", Late)
        with pytest.raises(serve.ConfigError, match=f"cannot listen on 127.0.0.1 port {port} .*--port"):
            serve._bind("127.0.0.1", port)


def test_the_key_is_asked_for_and_never_shown(small, tmp_path):
    options = ("--model", small, "--api-key", "a-key-of-mine", "--log-level", "debug")
    with serving(PYTHON, tmp_path, *options) as (program, port):
        url = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer a-key-of-mine"}).status_code == 200
        program.signal(signal.SIGTERM)
        assert program.ends() == 0
        assert "a-key-of-mine" not in program.output
