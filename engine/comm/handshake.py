"""How the ranks' connections come about: rank 0 listens for a while, and takes those who know its token.

Every rank makes two connections: COMMANDS carries rank 0's messages and the answers to them, WATCH what their watching
threads say to each other, so that neither waits for the other.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable

import torch.distributed as dist

from engine.errors import EngineDeadError

ADDRESS_KEY = "turnout/control"
HANDSHAKE_SECONDS = 120.0
COMMANDS, WATCH = CHANNELS = (0, 1)
_POLL_SECONDS = 0.2
_PLACE = struct.Struct("!IB")
_TOKEN_BYTES = 64
HELLO_BYTES = _TOKEN_BYTES + _PLACE.size

Peers = dict[tuple[int, int], socket.socket]
"""(rank, channel) -> connection."""


def hello(token: str, rank: int, channel: int) -> bytes:
    return token.encode() + _PLACE.pack(rank, channel)


class Reception:
    """Rank 0's listener, until every other rank has made its connections.

    `lost_rank` says why a rank will never connect, or None; it is asked again and again.
    """

    def __init__(self, store: dist.Store, world_size: int, host: str, lost_rank: Callable[[], str | None]):
        self._lost_rank = lost_rank
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.listener = _listen(host)
        store.set(ADDRESS_KEY, json.dumps([host, self.listener.getsockname()[1], self._token]))
        self._missing = {(rank, channel) for rank in range(1, world_size) for channel in CHANNELS}
        self._peers: Peers = {}

    def wait(self) -> Peers:
        """Waits for every rank at once, so that a stranger who connects and says nothing delays no one.

        Raises EngineDeadError if a rank does not come."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        self.listener.setblocking(False)
        with selectors.DefaultSelector() as selector, self.listener:
            selector.register(self.listener, selectors.EVENT_READ)
            while self._missing:
                if (reason := self._lost_rank()) is not None:
                    raise EngineDeadError(reason)
                if time.monotonic() > deadline:
                    missing = sorted({rank for rank, _ in self._missing})
                    raise EngineDeadError(f"ranks {missing} did not connect within {HANDSHAKE_SECONDS:.0f} s.")
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.fileobj is self.listener:
                        self._welcome(selector)
                    else:
                        self._greet(selector, key.fileobj, key.data)
            for key in [k for k in selector.get_map().values() if k.fileobj is not self.listener]:
                key.fileobj.close()
        return self._peers

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):  # gone again already
            peer, _ = self.listener.accept()
            peer.setblocking(False)
            selector.register(peer, selectors.EVENT_READ, bytearray())

    def _greet(self, selector: selectors.BaseSelector, peer: socket.socket, said: bytearray) -> None:
        """Takes what has come of a peer's hello; keeps the peer if it knows the token and is one still missing."""
        piece = b""
        with contextlib.suppress(OSError):
            piece = peer.recv(HELLO_BYTES - len(said))
        said += piece
        if piece and len(said) < HELLO_BYTES:
            return
        selector.unregister(peer)
        place = self._place_of(bytes(said))
        if place not in self._missing:
            peer.close()
            return
        peer.setblocking(True)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._missing.remove(place)
        self._peers[place] = peer

    def _place_of(self, said: bytes) -> tuple[int, int] | None:
        if len(said) < HELLO_BYTES or not hmac.compare_digest(said[:_TOKEN_BYTES], self._token.encode()):
            return None
        return _PLACE.unpack(said[_TOKEN_BYTES:])


def connect(store: dist.Store, rank: int) -> tuple[socket.socket, socket.socket]:
    """The two connections of a rank to rank 0, which listens by now or soon will."""
    host, port, token = json.loads(store.get(ADDRESS_KEY))
    peers = []
    for channel in CHANNELS:
        peer = socket.create_connection((host, port), timeout=HANDSHAKE_SECONDS)
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(hello(token, rank, channel))
        peers.append(peer)
    return peers[COMMANDS], peers[WATCH]


def _listen(host: str) -> socket.socket:
    """On the address that the others will use, if it is one of this host's own. Where it is only a name for this host
    outside (a gateway's), on all of them: for a moment, and only who knows the token gets in."""
    try:
        return socket.create_server((host, 0))
    except OSError:
        return socket.create_server(("", 0))
