"""How rank 0 tells the other ranks what to do: JSON frames over plain TCP.

Not a collective, so that an idle engine waits in no pending operation that could time out, and not pickle, so that
nothing read from a socket can run. A rank that dies closes its socket, which the other side sees at once.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from engine.log import logger
from engine.request import EngineDeadError

_ADDRESS_KEY = "turnout/control"
_HANDSHAKE_SECONDS = 120.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 3.0
_LENGTH = struct.Struct("!I")
_HELLO_BYTES = 64 + _LENGTH.size


class ControlServer:
    """Rank 0's end. Accepts one connection from every other rank, then sends frames to all of them.

    `lost_rank` says why a rank will never connect, or None; it is asked again and again until all have connected.
    Raises EngineDeadError if one does not.
    """

    def __init__(
        self, store: dist.Store, world_size: int, host: str, lost_rank: Callable[[], str | None] = lambda: None
    ):
        self._lost_rank = lost_rank
        self._token = secrets.token_hex(32)
        self._listener = socket.create_server((host, 0))
        port = self._listener.getsockname()[1]
        store.set(_ADDRESS_KEY, json.dumps([host, port, self._token]))
        self._peers: dict[int, socket.socket] = {}
        self._closing = False
        self._failed = threading.Event()
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._accept(world_size)
        self._selector = selectors.DefaultSelector()
        for rank, peer in self._peers.items():
            self._selector.register(peer, selectors.EVENT_READ, rank)
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def _accept(self, world_size: int) -> None:
        """Waits for every rank at once, so that a stranger who connects and says nothing delays no one."""
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while len(self._peers) < world_size - 1:
                if (reason := self._lost_rank()) is not None:
                    raise EngineDeadError(reason)
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, world_size)) - set(self._peers))
                    raise EngineDeadError(f"ranks {missing} did not connect within {_HANDSHAKE_SECONDS:.0f} s.")
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.fileobj is self._listener:
                        self._welcome(selector)
                    else:
                        self._greet(selector, key.fileobj, key.data, world_size)
            for key in [k for k in selector.get_map().values() if k.fileobj is not self._listener]:
                key.fileobj.close()

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # gone again already
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            selector.register(peer, selectors.EVENT_READ, bytearray())

    def _greet(self, selector: selectors.BaseSelector, peer: socket.socket, hello: bytearray, world_size: int) -> None:
        """Takes what has come of a peer's hello; keeps the peer if it knows the token and is a rank still missing."""
        piece = b""
        with contextlib.suppress(OSError):
            piece = peer.recv(_HELLO_BYTES - len(hello))
        hello += piece
        if piece and len(hello) < _HELLO_BYTES:
            return
        selector.unregister(peer)
        rank = self._rank_of(bytes(hello))
        if rank is None or not 0 < rank < world_size or rank in self._peers:
            peer.close()
            return
        peer.setblocking(True)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peers[rank] = peer

    def _rank_of(self, hello: bytes) -> int | None:
        if len(hello) < _HELLO_BYTES or not hmac.compare_digest(hello[:64], self._token.encode()):
            return None
        return _LENGTH.unpack(hello[64:])[0]

    def _watch(self) -> None:
        """Notes the first rank that reports an error or goes away before `close`."""
        with self._selector as selector:
            for key, _ in selector.select():
                frame = None
                with contextlib.suppress(OSError, ValueError):
                    frame = _receive(key.fileobj)
                if not self._closing:
                    reason = frame.get("failed") if isinstance(frame, dict) else None
                    self.failure = f"rank {key.data} {reason or 'ended without a word'}"
                    logger.error("%s", self.failure)
                    self._failed.set()
                    self.on_failure()
                return

    def wait_for_failure(self, seconds: float) -> str | None:
        """Why a rank failed, if one does within `seconds`."""
        self._failed.wait(seconds)
        return self.failure

    def broadcast(self, message: dict[str, Any]) -> None:
        """Sends one frame to every other rank. Raises EngineDeadError if one is gone."""
        frame = _frame(message) if self._peers else b""
        for rank, peer in self._peers.items():
            try:
                peer.sendall(frame)
            except OSError as error:
                raise EngineDeadError(f"rank {rank} is gone ({error.strerror or error}).") from error

    def close(self) -> None:
        self._closing = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(1.0)  # a socket that is closed before the watch saw its end would never wake it
        for peer in self._peers.values():
            peer.close()


class ControlClient:
    """Another rank's end. When rank 0 goes away the process ends, even from inside a collective that would hang."""

    def __init__(self, store: dist.Store, rank: int):
        host, port, token = json.loads(store.get(_ADDRESS_KEY))
        self._socket = socket.create_connection((host, port), timeout=_HANDSHAKE_SECONDS)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(token.encode() + _LENGTH.pack(rank))
        self._closed = threading.Event()
        self._end = select.poll()
        self._end.register(self._socket, select.POLLRDHUP)
        self._watcher = threading.Thread(target=self._end_with_rank_0, name="rank-0-watch", daemon=True)
        self._watcher.start()

    def _end_with_rank_0(self) -> None:
        self._end.poll()
        if not self._closed.wait(_GRACE_SECONDS):
            os._exit(1)

    def receive(self) -> dict[str, Any] | None:
        """The next frame; None once rank 0 has closed or died."""
        try:
            return _receive(self._socket)
        except OSError:
            return None

    def report_failure(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(_frame({"failed": reason}))

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _frame(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def _receive(peer: socket.socket) -> dict[str, Any] | None:
    head = _receive_exactly(peer, _LENGTH.size)
    body = head and _receive_exactly(peer, _LENGTH.unpack(head)[0])
    return json.loads(body) if body else None


def _receive_exactly(peer: socket.socket, size: int) -> bytes | None:
    """`size` bytes, or None at the end of the stream."""
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)
