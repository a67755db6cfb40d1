"""The clients of `engine.bench serve`, in a process of their own: `python -m engine.bench.serve_load`.

Reads a load as JSON from each line of standard input, puts it on the server, and writes a line of records. Nothing here
shares an interpreter with the server, and bytes that arrive are only noted with their time while a stream runs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from engine.bench.serve_stats import Record
from engine.bench.traces import Session

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """Closed loop: `concurrency` clients, each with the next session once its last has ended. Open loop: session i
    comes `arrivals[i]` seconds after the start, whatever has become of those before. One of the two is None."""

    sessions: list[Session]
    concurrency: int | None = None
    arrivals: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Load:
        return cls([Session.from_dict(s) for s in data["sessions"]], data["concurrency"], data["arrivals"])


class Connection(asyncio.Protocol):
    """A kept-alive connection, one request at a time. What came is kept in `pieces`: (time, bytes)."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.pieces: list[tuple[float, bytes]] = []
        self.is_open = False
        self._answered: asyncio.Future[None] | None = None
        self._tail = b""

    async def ask(self, request: bytes) -> float:
        """Sends a request and waits for the end of its answer, or of the connection; returns when it was sent."""
        self.pieces, self._tail = [], b""
        self._answered = asyncio.get_running_loop().create_future()
        sent = time.monotonic()
        self.transport.write(request)
        await self._answered
        return sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :]
        if self._tail == _END_OF_CHUNKS or (len(self.pieces) < 4 and self._has_plain_body()):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._end()

    def _end(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def _has_plain_body(self) -> bool:
        """Whether an answer of a stated length, as errors are, is there."""
        head, mark, body = b"".join(data for _, data in self.pieces).partition(b"\r\n\r\n")
        length = _headers(head).get(b"content-length") if mark else None
        return length is not None and len(body) >= int(length)


def _headers(head: bytes) -> dict[bytes, bytes]:
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in lines}


def read_answer(pieces: list[tuple[float, bytes]]) -> tuple[int, list[tuple[float, dict[str, Any]]]]:
    """(status, [(when it had arrived, event), ...]) of what a connection kept; status 0 for a broken answer."""
    raw = b"".join(data for _, data in pieces)
    head, mark, _ = raw.partition(b"\r\n\r\n")
    if not mark:
        return 0, []
    status = int(head.split(b" ", 2)[1])
    if _headers(head).get(b"transfer-encoding") != b"chunked":
        return status, []
    if not raw.endswith(_END_OF_CHUNKS):
        return 0, []
    events, text = [], b""
    for when, chunk in _chunks(raw, len(head) + len(mark), pieces):
        *whole, text = (text + chunk).split(b"\n\n")
        events += [(when, event.removeprefix(b"data: ")) for event in whole]
    return status, [(when, json.loads(event)) for when, event in events if event != b"[DONE]"]


def _chunks(raw: bytes, start: int, pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The chunks of a body that begins at `start`, each with the time at which its last byte came."""
    number, reached = 0, len(pieces[0][1])
    while True:
        line = raw.index(b"\r\n", start)
        size = int(raw[start:line], 16)
        if size == 0:
            return
        start = line + 4 + size
        while reached < start - 2:
            number += 1
            reached += len(pieces[number][1])
        yield pieces[number][0], raw[line + 2 : line + 2 + size]


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    return head.encode() + b"\r\n\r\n" + raw


def record_of(sent: float, pieces: list[tuple[float, bytes]]) -> tuple[Record, list[int]]:
    """The request's record and the tokens of its answer, where they were asked for."""
    status, events = read_answer(pieces)
    record = Record(sent, finished=pieces[-1][0] if pieces else time.monotonic(), status=status)
    token_ids: list[int] = []
    for when, event in events:
        if "error" in event:
            record.status = 500
        for choice in event.get("choices", ()):
            if choice["text"] or choice.get("token_ids"):
                record.times.append(when)
                token_ids += choice.get("token_ids", ())
        if usage := event.get("usage"):
            record.num_prompt, record.num_output = usage["prompt_tokens"], usage["completion_tokens"]
            record.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return record, token_ids


class Clients:
    """Puts one load on the server at `port` of this host."""

    def __init__(self, port: int, load: Load):
        self._port, self._load = port, load
        self._idle: list[Connection] = []
        self.records: list[Record] = []

    async def run(self) -> list[Record]:
        load = self._load
        self._idle = [await self._connect() for _ in range(load.concurrency or 1)]
        start = time.monotonic()
        if load.arrivals is None:
            waiting = iter(load.sessions)
            await asyncio.gather(*(self._client(waiting) for _ in range(load.concurrency)))
        else:
            pairs = zip(load.sessions, load.arrivals, strict=True)
            await asyncio.gather(*(self._later(session, start + after) for session, after in pairs))
        for connection in self._idle:
            connection.transport.close()
        return self.records

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return connection

    async def _client(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            await self._session(session)

    async def _later(self, session: Session, when: float) -> None:
        await asyncio.sleep(when - time.monotonic())
        await self._session(session)

    async def _session(self, session: Session) -> None:
        """Its turns one after the other; a turn that fails is the last."""
        context: list[int] = []
        for turn in session.turns:
            context = context + turn.new_ids
            request = request_bytes("/v1/completions", body_of(context, turn.max_tokens, len(session.turns) > 1))
            await asyncio.sleep(turn.think_seconds)
            connection = self._idle.pop() if self._idle else await self._connect()
            sent = await connection.ask(request)
            record, answer = record_of(sent, connection.pieces)
            self.records.append(record)
            if connection.is_open:
                self._idle.append(connection)
            if not record.ok:
                return
            context = context + answer


def body_of(prompt: list[int], max_tokens: int, wants_ids: bool) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    return body | ({"return_token_ids": True} if wants_ids else {})


def main() -> int:
    for line in sys.stdin:
        plan = json.loads(line)
        records = asyncio.run(Clients(plan["port"], Load.from_dict(plan["load"])).run())
        print(json.dumps([asdict(record) for record in records]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
