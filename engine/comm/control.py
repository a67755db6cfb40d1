"""How rank 0 tells the other ranks what to do, and how all of them learn that one has failed: JSON over plain TCP.

Not a collective, so that an idle engine waits in no pending operation that could time out, and not pickle, so that
nothing read from a socket can run. A rank that dies closes its sockets, which the other side sees at once; a rank that
hangs is found by two threads that ask after each other once a second, and by the steps it does not finish.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from engine.comm import handshake
from engine.comm.frames import FrameReader, frame, receive
from engine.comm.handshake import COMMANDS, WATCH
from engine.comm.process_mark import kill_if_here, own_mark
from engine.comm.step_watch import DEFAULT_PATIENCE, START, Patience, StepDigest, StepWatch, Verdict
from engine.errors import EngineDeadError
from engine.log import logger

_BEAT_SECONDS = 1.0
_GRACE_SECONDS = 3.0
_REPORT_SECONDS = 0.2  # a rank whose collective broke may report before the end of the one that died is seen


class ControlServer:
    """Rank 0's end. Waits for every other rank, then sends frames to all of them and watches over them.

    `lost_rank` says why a rank will never connect, `lost_parent` why this process is not looked after any more, or
    None. `position` counts the collectives that this rank has entered; `loads` says of each rank how many bytes of its
    weights it has read, and of how many. Raises EngineDeadError if a rank does not connect.
    """

    def __init__(
        self,
        store: dist.Store,
        world_size: int,
        host: str,
        lost_rank: Callable[[], str | None] = lambda: None,
        patience: Patience = DEFAULT_PATIENCE,
        lost_parent: Callable[[], str | None] = lambda: None,
    ):
        self._lost_parent = lost_parent
        self._reception = handshake.Reception(store, world_size, host, lost_rank)
        self._closing = False
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.on_verdict: Callable[[], None] = lambda: None
        self.position: Callable[[], float] = lambda: 0
        self.loads: Callable[[], Sequence[tuple[int, int]]] = lambda: [(0, 0)] * world_size
        self.watch = StepWatch(world_size, patience)
        self._step, self._base = START, 0
        self.step_thread = threading.get_ident()
        self._marks: dict[int, list] = {}
        self._reported: set[int] = set()
        self._report: tuple[float, str] | None = None
        peers = self._reception.wait()
        self._commands = {rank: peer for (rank, channel), peer in peers.items() if channel == COMMANDS}
        self._watched = {rank: peer for (rank, channel), peer in peers.items() if channel == WATCH}
        for peer in self._commands.values():
            peer.settimeout(patience.step)
        self.watch.began(START)
        self._selector = selectors.DefaultSelector()
        self._readers = {place: FrameReader(peer) for place, peer in peers.items()}
        for place, peer in peers.items():
            self._selector.register(peer, selectors.EVENT_READ, place)
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def begin_step(self, message: dict[str, Any]) -> None:
        """Sends every other rank its part of the next step."""
        self._step += 1
        self._base, self.step_thread = self.position(), threading.get_ident()
        self.watch.began(self._step)
        self.broadcast(message | {"step": self._step})

    def end_step(self, digest: StepDigest | None = None) -> None:
        """Rank 0 is done with the present step, of which the start is the first; without a digest, in vain."""
        self.watch.finished(0, self._step, digest)

    def _watch(self) -> None:
        """Notes the first rank that reports an error, goes away before `close`, hangs or disagrees."""
        with self._selector as selector:
            beat = time.monotonic()
            while not (self._closing or self._failed.is_set()):
                until = beat if self._report is None else self._report[0]
                for key, _ in selector.select(max(until - time.monotonic(), 0)):
                    self._listen_to(*key.data)
                    if self._closing or self._failed.is_set():
                        return
                if self._report is not None and time.monotonic() >= self._report[0]:
                    self.fail(self._report[1])
                    return
                if time.monotonic() >= beat:
                    beat = time.monotonic() + _BEAT_SECONDS
                    self._ask_all()
                    if (reason := self._lost_parent()) is not None:
                        self.fail(f"rank 0 {reason}")
                verdict = self.watch.verdict()
                if verdict is not None:
                    self._condemn(verdict)

    def _listen_to(self, rank: int, channel: int) -> None:
        reader, commands = self._readers[rank, channel], self._readers[rank, COMMANDS]
        try:
            for message in reader.take():
                self._note(rank, message)
            while reader.is_at_end and (messages := commands.take()):  # its last words, on the other connection
                for message in messages:
                    self._note(rank, message)
        except (AttributeError, LookupError, TypeError, ValueError):
            self.fail(f"rank {rank} sent what is no message")
        if reader.is_at_end:
            self._selector.unregister(reader.peer)
            if rank not in self._reported:
                self.fail(f"rank {rank} ended without a word")

    def _note(self, rank: int, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._reported.add(rank)
            self._report = self._report or (time.monotonic() + _REPORT_SECONDS, f"rank {rank} {message['failed']}")
        elif "done" in message:
            step, *digest = message["done"]
            self.watch.finished(rank, step, StepDigest(*digest) if digest else None)
        else:
            self._marks.setdefault(rank, message.get("process"))
            self.watch.heard(rank, message["at"] and tuple(message["at"]))

    def _ask_all(self) -> None:
        self.watch.heard(0, (self._step, self.position() - self._base))
        if self._step == START:
            self.watch.loaded(self.loads())
        question = frame({"process": own_mark()})
        for peer in self._watched.values():
            with contextlib.suppress(OSError):  # a full buffer is that of a rank that is silent anyway
                peer.send(question, socket.MSG_DONTWAIT)

    def _condemn(self, verdict: Verdict) -> None:
        self.fail(verdict.reason)
        for rank in verdict.ranks:
            kill_if_here(self._marks.get(rank))

    def fail(self, reason: str) -> None:
        """Takes the first reason for which the engine cannot go on, and tells everybody."""
        with self._lock:
            if self.failure is not None or self._closing:
                return
            self.failure = reason
        logger.error("%s", reason)
        for peer in self._watched.values():
            with contextlib.suppress(OSError):
                peer.send(frame({"failed": reason}), socket.MSG_DONTWAIT)
        self._failed.set()
        self.on_failure()
        self.on_verdict()

    def wait_for_failure(self, seconds: float) -> str | None:
        """Why a rank failed, if one does within `seconds`."""
        self._failed.wait(seconds)
        return self.failure

    def broadcast(self, message: dict[str, Any]) -> None:
        """Sends one frame to every other rank. Raises EngineDeadError if one is gone or does not read."""
        data = frame(message) if self._commands else b""
        for rank, peer in self._commands.items():
            try:
                peer.sendall(data)
            except TimeoutError:
                raise EngineDeadError(f"rank {rank} has read nothing for {peer.gettimeout():g} s.") from None
            except OSError as error:
                raise EngineDeadError(f"rank {rank} is gone ({error.strerror or error}).") from error

    def close(self) -> None:
        self._closing = True
        peers = [*self._commands.values(), *self._watched.values()]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(1.0)  # a socket that is closed before the watch saw its end would never wake it
        for peer in peers:
            peer.close()


class ControlClient:
    """Another rank's end. When rank 0 goes away or is silent, the process ends, even from inside a collective that
    would hang.

    is_attending: whether this rank's program is where it takes rank 0's steps; expects_more: whether the last step
    left work, so that another must follow.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        patience: Patience = DEFAULT_PATIENCE,
        lost_parent: Callable[[], str | None] = lambda: None,
    ):
        self.rank, self._lost_parent = rank, lost_parent
        self._commands, self._watch = handshake.connect(store, rank)
        self.position: Callable[[], float] = lambda: 0
        self.is_attending, self.expects_more = True, False
        self.failure: str | None = None
        self._ended = threading.Event()
        self._silent_seconds = patience.silence
        self._step, self._done, self._base = START, START - 1, 0
        self._since = time.monotonic()
        self._zero_mark: list | None = None
        self._closed = threading.Event()
        self._poll = select.poll()
        self._poll.register(self._watch, select.POLLIN | select.POLLRDHUP)
        self._watcher = threading.Thread(target=self._end_with_rank_0, name="rank-0-watch", daemon=True)
        self._watcher.start()

    def receive(self) -> dict[str, Any] | None:
        """The next frame; None once rank 0 has closed or died."""
        try:
            message = receive(self._commands)
        except OSError:
            return None
        if message is not None and "step" in message:
            self._base, self._since, self._step = self.position(), time.monotonic(), message["step"]
        return message

    def end_step(self, digest: StepDigest | None = None, expects_more: bool = False) -> None:
        """Says that the present step is done; the first one is the start."""
        self._done, self.expects_more = self._step, expects_more
        self._since = time.monotonic()
        with contextlib.suppress(OSError):
            self._commands.sendall(frame({"done": [self._step, *(digest or ())]}))

    def wait_for_failure(self, seconds: float) -> str | None:
        """Why the engine has failed, if that becomes known within `seconds`."""
        self._ended.wait(seconds)
        return self.failure

    def report_failure(self, reason: str) -> None:
        with contextlib.suppress(OSError):
            self._commands.sendall(frame({"failed": reason}))

    def _end_with_rank_0(self) -> None:
        self._answer_rank_0()
        self._ended.set()
        with contextlib.suppress(OSError):
            self._commands.shutdown(socket.SHUT_RD)  # `receive` returns
        if not self._closed.wait(_GRACE_SECONDS):
            os._exit(1)

    def _answer_rank_0(self) -> None:
        """Tells rank 0 how far this rank is whenever it asks, until the end of one of them."""
        reader, mark = FrameReader(self._watch), own_mark()
        heard = time.monotonic()
        while not self._closed.is_set():
            if (reason := self._lost_parent()) is not None:
                self.failure = f"rank {self.rank} {reason}"
                with contextlib.suppress(OSError):
                    self._watch.send(frame({"failed": reason}), socket.MSG_DONTWAIT)
                return
            if self._poll.poll(_BEAT_SECONDS * 1000):
                heard = time.monotonic()
                for message in reader.take():
                    if "failed" in message:
                        self.failure = message["failed"]
                        return
                    self._zero_mark = message["process"]
                    self._say_where(mark)
                if reader.is_at_end:
                    return
            elif self._is_forsaken(heard):
                self.failure = f"rank 0 does not respond in step {self._step}."
                logger.error("%s", self.failure)
                kill_if_here(self._zero_mark)
                return

    def _say_where(self, mark: list) -> None:
        at = [self._step, self.position() - self._base] if self.is_attending else None
        with contextlib.suppress(OSError):
            self._watch.send(frame({"at": at, "process": mark}), socket.MSG_DONTWAIT)

    def _is_forsaken(self, heard: float) -> bool:
        waits = self._step != START and (self._done < self._step or self.expects_more)
        return waits and time.monotonic() - max(heard, self._since) > self._silent_seconds

    def close(self) -> None:
        self._closed.set()
        for peer in (self._commands, self._watch):
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
