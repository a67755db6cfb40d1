"""What a client sees of answers that wait or take too long: a status before the first byte, an error event after it."""

import json
import socket
import threading

import pytest

from engine.config import EngineConfig
from engine.launch import start_engine
from tests.checkpoints import SMALL, build_checkpoint
from tests.engine.server.harness import error_of, read_stream, request_bytes, serving
from tests.processes import until

PATH = "/v1/completions"
LONG = {"prompt": "a", "temperature": 0, "ignore_eos": True, "max_tokens": 100_000}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One answer runs at a time, for 1 s at most; others wait for 0.3 s."""
    model = str(build_checkpoint(tmp_path_factory.mktemp("small"), SMALL))
    limits = {"max_num_seqs": 1, "queue_timeout": 0.3, "request_timeout": 1.0}
    core, _ = start_engine(EngineConfig(model=model, device="cpu", num_threads=1, **limits))
    with serving(core) as running:
        yield running


def test_waiting_and_taking_too_long(server):
    """The one that runs is cut off: 504, and the SDK is told not to try that again. The others come back later."""
    answers = {}

    def post(stream: bool, name: str) -> None:
        answers[name] = server.post(PATH, LONG | {"stream": stream})

    calls = [threading.Thread(target=post, args=(False, "first"))]
    calls[0].start()
    until(lambda: server.core.num_begun and not server.core.num_unbegun, 10, "the first one runs")
    calls += [threading.Thread(target=post, args=(stream, f"late {stream}")) for stream in (False, True)]
    for call in calls[1:]:
        call.start()
    for call in calls:
        call.join(20)
    assert error_of(answers["first"], 504)["code"] == "request_timeout"
    assert answers["first"].headers["x-should-retry"] == "false"
    for name in ("late False", "late True"):
        error = error_of(answers[name], 503)
        assert error["code"] == "queue_timeout" and error["type"] == "server_error"
        assert int(answers[name].headers["retry-after"]) >= 1
    until(lambda: not server.core.has_unfinished(), 10, "nothing runs")
    stats = server.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    metrics = server.http().get("/metrics").text
    assert 'turnout_request_finished_total{reason="timeout"} 3.0' in metrics
    assert 'turnout_request_rejected_total{reason="queue_timeout"} 2.0' in metrics


def test_a_stream_cut_off_has_its_text_and_an_error(server):
    data = [json.loads(item) for item in read_stream(server.post(PATH, LONG | {"stream": True}))]
    assert data[-1]["error"]["code"] == "request_timeout"
    assert len(data) > 1 and all("error" not in event for event in data[:-1])
    assert all(event["choices"][0]["finish_reason"] is None for event in data[:-1])


def test_hanging_up_before_the_first_byte_frees_the_place(server):
    """A stream that waits has sent nothing yet, and its client may leave all the same."""
    running = socket.create_connection(("127.0.0.1", server.port))
    running.sendall(request_bytes(PATH, LONG | {"stream": True}))
    assert running.recv(10)
    before = server.core.stats().num_finished["abort"]
    waiting = socket.create_connection(("127.0.0.1", server.port))
    waiting.sendall(request_bytes(PATH, LONG | {"stream": True}))
    until(lambda: server.core.num_unbegun, 10, "the second one waits")
    waiting.close()
    until(lambda: not server.core.num_unbegun, 10, "it has left")
    running.close()
    until(lambda: not server.core.has_unfinished(), 10, "nothing runs")
    assert server.core.stats().num_finished["abort"] - before >= 1
