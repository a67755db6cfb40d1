"""`serve.py` over all ranks with made-up weights, and clients that stream completions from it."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.full_size_shape import Options, engine_settings, shape_of
from benchmarks.ranks import ROOT, environment
from engine.bench import traces
from engine.bench.serve_arms import ClientProcess
from engine.bench.serve_load import Load
from engine.bench.serve_stats import Limits, summarise_load

LIMITS = Limits(ttft=2.0, itl=0.05)
_SPECIAL = 256  # ids at the end of the vocabulary
_LOOK_SECONDS = 0.2
_END_SECONDS = 40.0
_TAIL = 2000


def run(options: Options, seconds: float) -> dict[str, Any]:
    """One load for each number of clients, after one that warms up. Raises RuntimeError with the server's last words
    where it does not start or a request fails."""
    shape, deadline = shape_of(options), time.monotonic() + seconds
    vocabulary = _vocabulary(Path(shape.model)) - _SPECIAL
    with _server(options, deadline) as port:
        clients = ClientProcess()
        try:
            clients.run(port, Load(traces.fixed(2, 8, 4, vocabulary, seed=-1), concurrency=2))
            rows = [_load(clients, port, count, options, vocabulary) for count in shape.clients]
        finally:
            clients.close()
    return {"passed": all(row["errors"] == 0 for row in rows), "rows": rows}


def _load(clients: ClientProcess, port: int, count: int, options: Options, vocabulary: int) -> dict[str, Any]:
    shape = shape_of(options)
    sessions = traces.fixed(count, shape.prompt_tokens, shape.output_tokens, vocabulary, seed=count)
    records = clients.run(port, Load(sessions, concurrency=count))
    return {"clients": count} | summarise_load(records, LIMITS)


def _vocabulary(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return config["text_config"]["vocab_size"]


def command_of(options: Options, port: int) -> list[str]:
    """Starts the server; it starts its other ranks itself."""
    settings, shape = engine_settings(options, options.tp, "auto"), shape_of(options)
    flags = {name: settings[name] for name in ("model", "tp", "ep", "device", "dtype", "load_format", "moe_comm")}
    flags |= {"hf_overrides": json.dumps(settings["hf_overrides"]), "port": port, "max_num_seqs": max(shape.clients)}
    flags |= {"max_model_len": shape.prompt_tokens + shape.output_tokens + 64}
    flags |= {"num_threads": 1} if options.device == "cpu" else {}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "serve.py", *words]


@contextmanager
def _server(options: Options, deadline: float) -> Iterator[int]:
    """The port of a server that answers; it is ended behind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryFile() as output:
        command = command_of(options, port)
        server = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        too_late = threading.Timer(deadline - time.monotonic(), server.kill)  # clients then see their streams break
        too_late.start()
        try:
            _wait_until_it_answers(server, port, deadline)
            yield port
        except Exception as error:
            output.seek(0)
            words = output.read().decode(errors="replace")[-_TAIL:]
            raise RuntimeError(f"{error}\n{words}") from error
        finally:
            too_late.cancel()
            _end(server)


def _wait_until_it_answers(server: subprocess.Popen, port: int, deadline: float) -> None:
    while not _is_healthy(port):
        if server.poll() is not None:
            late = ", out of time," if time.monotonic() > deadline else ""
            raise RuntimeError(f"the server ended{late} with exit code {server.returncode} while it started:")
        time.sleep(_LOOK_SECONDS)


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:  # it does not listen yet
        return False
    finally:
        connection.close()


def _end(server: subprocess.Popen) -> None:
    server.terminate()
    try:
        server.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
