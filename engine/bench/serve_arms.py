"""The two ways into one engine that `engine.bench serve` sets against each other: calls in process, and HTTP."""

from __future__ import annotations

import heapq
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.report import MeasurementError
from engine.bench.serve_load import Load
from engine.bench.serve_stats import Record
from engine.request import CompletionDelta
from engine.sampling_params import SamplingParams

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 30.0


@dataclass
class _Client:
    """One of the load's sessions while it runs in process."""

    session: int
    turn: int = 0
    context: list[int] = field(default_factory=list)
    record: Record | None = None
    answer: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class InProcess:
    """Drives a core as `LLM.generate` does: adds requests, steps, collects what each step brought."""

    def __init__(self, core: Any, load: Load):
        self._core, self._load = core, load
        self._due: list[tuple[float, int, _Client]] = []
        self._running: dict[str, _Client] = {}
        self._next = self._number = 0
        self.records: list[Record] = []

    def run(self) -> list[Record]:
        load, start = self._load, time.monotonic()
        if load.arrivals is None:
            for _ in range(min(load.concurrency, len(load.sessions))):
                self._begin(start)
        else:
            for after in load.arrivals:
                self._begin(start + after)
        while self._due or self._running:
            self._send()
            if self._running:
                self._take(self._core.step())
            elif self._due:
                time.sleep(max(self._due[0][0] - time.monotonic(), 0.0))
        while self._core.has_unfinished():  # a step that was launched ahead
            self._core.step()
        return self.records

    def _begin(self, when: float) -> None:
        """The next session of the load, if there is one."""
        if self._next < len(self._load.sessions):
            self._wait(when, _Client(self._next))
            self._next += 1

    def _wait(self, when: float, client: _Client) -> None:
        heapq.heappush(self._due, (when, self._number, client))
        self._number += 1

    def _send(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, number, client = heapq.heappop(self._due)
            turn = self._load.sessions[client.session].turns[client.turn]
            client.context = client.context + turn.new_ids
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=turn.max_tokens)
            client.record = Record(time.monotonic(), num_prompt=len(client.context))
            client.answer, client.texts = [], []
            self._core.add_request(f"bench-{number}", client.context, params)
            self._running[f"bench-{number}"] = client

    def _take(self, deltas: list[CompletionDelta]) -> None:
        now = time.monotonic()
        for delta in deltas:
            client = self._running[delta.request_id]
            if delta.token_ids:
                client.record.times.append(now)
                client.answer += delta.token_ids
                client.texts.append(delta.text)
            if delta.finish_reason is not None:
                del self._running[delta.request_id]
                self._finish(client, delta, now)

    def _finish(self, client: _Client, delta: CompletionDelta, now: float) -> None:
        record, turns = client.record, self._load.sessions[client.session].turns
        record.finished, record.num_output = now, len(client.answer)
        record.num_cached = delta.metrics.num_cached_tokens
        self.records.append(record)
        client.context = client.context + client.answer
        client.turn += 1
        if client.turn < len(turns):
            self._wait(now + turns[client.turn].think_seconds, client)
        elif self._load.arrivals is None:
            self._begin(now)


class ClientProcess:
    """`engine.bench.serve_load` in a process of its own, for any number of loads."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.bench.serve_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            text=True,
        )

    def run(self, port: int, load: Load) -> list[Record]:
        self._process.stdin.write(json.dumps({"port": port, "load": load.to_dict()}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise MeasurementError(f"the client process ended with {self._process.wait()}; see its words above.")
        return [Record(**values) for values in json.loads(line)]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@contextmanager
def http_server(core: Any) -> Iterator[tuple[int, str]]:
    """(port, what carries it) of the real server over `core`, which is shut down at the end; a port of the loopback."""
    import uvicorn

    from engine.server.app import create_app
    from engine.server.client import EngineClient

    client = EngineClient(core)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as serve.py does
    config = uvicorn.Config(create_app(client, served_model_names=["bench"]), log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="server", daemon=True)
    thread.start()
    try:
        _wait_for(server, thread)
        loop = "asyncio" if importlib.util.find_spec("uvloop") is None else "uvloop"  # uvicorn's own choice
        yield listener.getsockname()[1], f"{config.http_protocol_class.__name__} on {loop}"
    finally:
        server.should_exit = True
        thread.join()
        client.close()
        listener.close()


def _wait_for(server: Any, thread: threading.Thread) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise MeasurementError("the server did not start; see its words above.")
        time.sleep(0.005)
