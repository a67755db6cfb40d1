"""JSON messages as frames on a stream socket: a length of four bytes, then the text."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!I")
_PIECE = 1 << 16


def frame(message: Any) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return LENGTH.pack(len(body)) + body


def receive(peer: socket.socket) -> Any | None:
    """Waits for the next message; None at the end of the stream."""
    head = _receive_exactly(peer, LENGTH.size)
    body = head and _receive_exactly(peer, LENGTH.unpack(head)[0])
    return json.loads(body) if body else None


def _receive_exactly(peer: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = peer.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


class FrameReader:
    """Takes what has come on a socket without ever waiting for the rest of it."""

    def __init__(self, peer: socket.socket):
        self.peer = peer
        self._data = bytearray()
        self.is_at_end = False

    def take(self) -> list[Any]:
        """The whole messages that have come since the last call. Raises ValueError for what is no message."""
        try:
            piece = self.peer.recv(_PIECE, socket.MSG_DONTWAIT)
            self.is_at_end = not piece
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            self.is_at_end = True
            return []
        self._data += piece
        return list(self._whole())

    def _whole(self):
        while len(self._data) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            body = bytes(self._data[LENGTH.size : end])
            del self._data[:end]
            yield json.loads(body)
