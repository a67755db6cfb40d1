"""The control channel: strangers are refused, a lost rank is noticed with its reason, the end is clean."""

from __future__ import annotations

import itertools
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.comm import control, frames, handshake
from engine.comm.control import ControlClient, ControlServer
from engine.comm.step_watch import DEFAULT_PATIENCE, Patience, StepDigest
from engine.errors import EngineDeadError
from tests.processes import until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 20.0


class Store:
    """The one part of torch's store that the channel uses, inside this process."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, SECONDS)
            return self.values[key].encode()


class Server:
    """A ControlServer that starts in a thread, since it waits for its ranks."""

    def __init__(self, world_size: int, patience: Patience = DEFAULT_PATIENCE):
        self.store, self.server, self.error = Store(), None, None
        self.thread = threading.Thread(target=self._start, args=(world_size, patience), daemon=True)
        self.thread.start()

    def _start(self, world_size: int, patience: Patience) -> None:
        try:
            self.server = ControlServer(self.store, world_size, "127.0.0.1", patience=patience)
        except EngineDeadError as error:
            self.error = error

    @property
    def address(self) -> tuple[str, int, str]:
        return tuple(json.loads(self.store.get(handshake.ADDRESS_KEY)))

    def connect(self) -> socket.socket:
        host, port, _ = self.address
        return socket.create_connection((host, port), SECONDS)

    def ready(self) -> ControlServer:
        self.thread.join(SECONDS)
        assert self.server is not None, self.error
        return self.server


@pytest.fixture
def pair():
    """A server and one client, closed afterwards whatever happens."""
    server = Server(2)
    client = ControlClient(server.store, 1)
    yield server.ready(), client
    client.close()
    server.ready().close()


def closed_by_peer(stranger: socket.socket) -> bool:
    stranger.settimeout(SECONDS)
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_frames_arrive_whole_and_in_order(pair):
    server, client = pair
    messages = [{"kind": "step", "n": i, "text": "漢\ud800\x00" * i} for i in range(20)] + [{"big": "x" * 3_000_000}]
    sender = threading.Thread(target=lambda: [server.broadcast(m) for m in messages])
    sender.start()
    assert [client.receive() for _ in messages] == messages
    sender.join()


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("/tmp/must-not-exist"),)


def junk(token: str) -> list[bytes]:
    wrong = "0" * 64
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"A" * 100,
        pickle.dumps(Bomb()).ljust(handshake.HELLO_BYTES, b"."),
        b"\xff" * 4096,
        handshake.hello(wrong, 1, handshake.COMMANDS),
        handshake.hello(token[:-1] + ("0" if token[-1] != "0" else "1"), 1, handshake.COMMANDS),
        handshake.hello(token, 0, handshake.COMMANDS),
        handshake.hello(token, 3, handshake.COMMANDS),
        handshake.hello(token, 2**32 - 1, handshake.COMMANDS),
    ]


@pytest.mark.parametrize("place", range(9))
def test_strangers_are_refused_and_the_ranks_still_come(place):
    server = Server(3)
    stranger = server.connect()
    data = junk(server.address[2])[place]
    stranger.sendall(data)
    if not data:
        stranger.shutdown(socket.SHUT_WR)
    assert closed_by_peer(stranger)
    clients = [ControlClient(server.store, rank) for rank in (2, 1)]
    server.ready().broadcast({"kind": "step"})
    assert [c.receive() for c in clients] == [{"kind": "step"}] * 2
    assert server.server.failure is None and not Path("/tmp/must-not-exist").exists()
    for client in clients:
        client.close()
    server.server.close()


def test_a_stranger_that_says_nothing_delays_no_one():
    """Nor one that says the half of it."""
    server = Server(2)
    silent, half = server.connect(), server.connect()
    half.sendall(b"0" * 30)
    client = ControlClient(server.store, 1)
    server.thread.join(3.0)
    assert server.server is not None
    assert closed_by_peer(silent) and closed_by_peer(half)
    client.close()
    server.server.close()


def test_a_rank_that_comes_twice_is_taken_once():
    server = Server(3)
    first = ControlClient(server.store, 1)
    again = server.connect()
    again.sendall(handshake.hello(server.address[2], 1, handshake.COMMANDS))
    assert closed_by_peer(again)
    second = ControlClient(server.store, 2)
    server.ready().broadcast({"n": 1})
    assert first.receive() == second.receive() == {"n": 1}
    for end in (first, second, server.server):
        end.close()


def test_nobody_can_connect_once_all_are_there(pair):
    server, _ = pair
    assert server._reception.listener.fileno() == -1


def test_the_listener_is_on_the_address_it_was_given():
    server = Server(2)
    assert server.address[0] == "127.0.0.1"
    client = ControlClient(server.store, 1)
    assert all(p.getsockname()[0] == p.getpeername()[0] == "127.0.0.1" for p in server.ready()._commands.values())
    client.close()
    server.server.close()


def test_ranks_that_never_come_are_named(monkeypatch):
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    server = Server(4)
    peers = [socket.create_connection(server.address[:2]) for _ in handshake.CHANNELS]
    for channel, peer in zip(handshake.CHANNELS, peers, strict=True):
        peer.sendall(handshake.hello(server.address[2], 2, channel))
    server.thread.join(SECONDS)
    assert server.error is not None and "[1, 3]" in str(server.error)


@pytest.mark.parametrize("callback", [True, False])
def test_a_reported_failure_is_noticed_with_its_reason(pair, callback):
    server, client = pair
    called = threading.Event()
    if callback:
        server.on_failure = called.set
    client.report_failure("failed: ValueError: out of blocks")
    assert server.wait_for_failure(SECONDS) == "rank 1 failed: ValueError: out of blocks"
    assert not callback or called.wait(SECONDS)


def test_what_is_no_failure_report_is_a_failure_too(pair):
    """A rank says nothing but why it fails; whatever else comes must not end the watch in silence."""
    server, client = pair
    client._commands.sendall(frames.frame(["junk"]))
    assert "rank 1" in server.wait_for_failure(SECONDS)


def test_a_rank_that_reads_no_weights_is_found_while_the_others_read():
    server = Server(2, Patience(start=0.5))
    peers = [server.connect() for _ in handshake.CHANNELS]
    for channel, peer in zip(handshake.CHANNELS, peers, strict=True):
        peer.sendall(handshake.hello(server.address[2], 1, channel))
    reads = itertools.count(1)
    server.ready().loads = lambda: [(next(reads), 10**9), (5 * 10**8, 10**9)]
    reason = server.server.wait_for_failure(SECONDS)
    assert reason.startswith("rank 1 has read nothing for 0.5 s while reading weights, at 0.50 of 1.00 GB")
    server.server.close()
    for peer in peers:
        peer.close()


def start_client(server: Server, then: str) -> subprocess.Popen:
    """Another process that joins as rank 1, then runs `then`."""
    script = (
        "import sys, types\n"
        "from engine.comm.control import ControlClient\n"
        "store = types.SimpleNamespace(get=lambda key: sys.argv[1].encode())\n"
        f"client = ControlClient(store, 1)\nprint('here', flush=True)\n{then}"
    )
    address = server.store.get(handshake.ADDRESS_KEY).decode()
    return subprocess.Popen([sys.executable, "-c", script, address], cwd=ROOT, stdout=subprocess.PIPE)


def test_a_killed_rank_is_noticed_at_once():
    server = Server(2)
    process = start_client(server, "client.receive()")
    try:
        assert process.stdout.readline() == b"here\n"
        ready = server.ready()
        assert ready.failure is None
        process.send_signal(signal.SIGKILL)
        assert ready.wait_for_failure(5.0) == "rank 1 ended without a word"
        with pytest.raises(EngineDeadError, match="rank 1"):
            for _ in range(100):
                ready.broadcast({"x": "y" * 100_000})
        ready.close()
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_reads_nothing_holds_nobody_up_for_ever():
    """Its process is stopped, so what is sent to it fills the buffers."""
    server = Server(2, Patience(step=2.0))
    process = start_client(server, "client.receive()")
    try:
        assert process.stdout.readline() == b"here\n"
        ready = server.ready()
        ready.end_step()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="rank 1"):
            while True:
                ready.broadcast({"x": "y" * 1_000_000})
        ready.close()
    finally:
        process.kill()
        process.wait()


def test_a_stopped_rank_is_named_and_killed():
    """Only when a step is to be done: before, nobody misses it."""
    server = Server(2, Patience(step=5.0))
    process = start_client(server, "client.end_step()\nclient.receive()\nimport threading\nthreading.Event().wait()")
    try:
        assert process.stdout.readline() == b"here\n"
        ready = server.ready()
        ready.end_step()
        until(lambda: not ready.watch.is_busy and ready._marks, SECONDS, "the start is over")
        process.send_signal(signal.SIGSTOP)
        assert ready.wait_for_failure(4.0) is None
        ready.begin_step({"kind": "step"})
        assert ready.wait_for_failure(SECONDS) == "rank 1 does not respond in step 1."
        assert process.wait(SECONDS) == -signal.SIGKILL
        ready.close()
    finally:
        process.kill()
        process.wait()


def test_of_a_broken_collective_and_a_dead_rank_the_dead_one_is_named():
    """The rank that still lives reports first, that its collective broke."""
    server = Server(3)
    process = start_client(server, "client.receive()")
    client = ControlClient(server.store, 2)
    try:
        assert process.stdout.readline() == b"here\n"
        ready = server.ready()
        client.report_failure("failed: RuntimeError: connection closed by peer")
        process.kill()
        assert ready.wait_for_failure(SECONDS) == "rank 1 ended without a word"
        assert client.wait_for_failure(SECONDS) == "rank 1 ended without a word", "all learn the reason"
    finally:
        client.close()
        ready.close()
        process.wait()


def test_every_step_is_answered_and_compared(pair):
    server, client = pair
    server.end_step()
    client.end_step()
    for number in (1, 2, 3):
        server.begin_step({"kind": "step"})
        assert client.receive() == {"kind": "step", "step": number}
        client.end_step(StepDigest(1, 4, 7))
        server.end_step(StepDigest(1, 4 if number < 3 else 5, 7))
    assert server.wait_for_failure(SECONDS) == "rank 1 disagrees at step 3: it scheduled 4 tokens, rank 0 5."
    assert client.wait_for_failure(SECONDS) == server.failure


def test_a_rank_stuck_in_a_collective_ends_when_rank_0_dies():
    """It cannot read the end of the stream, so the watch ends it."""
    server = Server(2)
    process = start_client(server, "import threading; threading.Event().wait()")
    try:
        assert process.stdout.readline() == b"here\n"
        server.ready().close()
        assert process.wait(control._GRACE_SECONDS + SECONDS) == 1
    finally:
        process.kill()
        process.wait()


def test_close_ends_the_client_and_is_no_failure(pair):
    server, client = pair
    server.close()
    assert client.receive() is None
    assert server.wait_for_failure(0.2) is None
    client.close()


def test_nothing_stays_behind():
    """Engines come and go in one process; their threads and sockets must too."""

    def watchers() -> int:
        return sum(t.name in ("rank-watch", "rank-0-watch") for t in threading.enumerate())

    before = watchers()
    for _ in range(20):
        server = Server(2)
        client = ControlClient(server.store, 1)
        server.ready().close()
        client.close()
        client._watcher.join(SECONDS)
    assert watchers() <= before


def test_a_client_that_closed_gets_nothing_more(pair):
    _, client = pair
    client.close()
    assert client.receive() is None
    client.report_failure("too late")
