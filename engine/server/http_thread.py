"""The HTTP server as a thread, from before the engine is loaded until the last answer, and how signals end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from engine import log
from engine.server.drain import Drain
from engine.server.loading import Gate
from engine.signals import Signals

BACKLOG = 2048  # connections that wait to be accepted
LINGER_SECONDS, LAST_SECONDS = 1.0, 6.0
CLOSE_SECONDS = 1  # for connections to close once every answer has ended
JOIN_SECONDS = 0.5
LAST_WORD_SECONDS = 1.0  # that a second signal gives an event loop which does not respond


class Server:
    """uvicorn in a thread, with our signals: the first lets accepted requests finish, the second ends all at once.

    It answers from the first moment on, at first that the engine loads: the engine is built in the main thread, since
    CUDA and the process group want one. While it drains it still listens, so that new calls get a 503 instead of a
    refused connection. A context manager: a block that raises, as a start that fails, leaves no thread behind."""

    def __init__(
        self,
        gate: Gate,
        listener: socket.socket,
        *,
        drain_timeout: float,
        log_level: str,
        ssl_certfile: str | None = None,
        ssl_keyfile: str | None = None,
    ):
        """listener: listens already; closed at the end. drain_timeout: seconds. log_level: as `log.setup` has it;
        of what uvicorn says at info nothing is of use."""
        self._gate = gate
        config = uvicorn.Config(
            gate,
            log_level="warning" if log_level == "info" else log_level,
            access_log=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ws="none",
            lifespan="off",
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._drain_timeout = drain_timeout
        self._kill_ranks: Callable[[], None] = lambda: None
        self._drain: Drain | None = None
        self._drain_task: asyncio.Task | None = None
        self._signals = Signals()
        self._error: BaseException | None = None
        self._loop = config.get_loop_factory()()
        self._serving = self._loop.create_task(self._server.serve(sockets=[listener]))
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """After `wait` there is nothing left to end."""
        self._tell(self._serving.cancel)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._until_served())
        except asyncio.CancelledError:
            return
        except BaseException as error:  # `wait` raises it in the main thread
            self._error = error

    async def _until_served(self) -> None:
        await self._serving

    def open(self, app: FastAPI, kill_ranks: Callable[[], None]) -> None:
        """The engine stands: `app` takes over, and signals end it in order."""
        self._kill_ranks, self._drain = kill_ranks, app.state.drain
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle_signal)
        self._gate.open(app)

    def wait(self) -> None:
        """Until the server has ended. Awake now and then, in case a signal has reached another thread."""
        while self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)
        if self._error is not None:
            raise self._error

    def _tell(self, action: Callable[[], Any]) -> None:
        """Has the event loop do it, if that has not ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def stop_after_failure(self, error: BaseException) -> None:
        """Stays a moment to answer 503. What then still does not end, ends by force: a step may hang for ever."""
        _later(LINGER_SECONDS, self._stop)
        _later(LAST_SECONDS, self._end_by_force)

    def _stop(self) -> None:
        self._server.should_exit = True

    def _end_by_force(self, code: int = 1) -> None:
        self._kill_ranks()
        os._exit(code)

    def _handle_signal(self, number: int, frame: object) -> None:
        if self._signals.is_second(number):
            self._tell(lambda: self._end_by_force(128 + number))  # there, so that no stream hears of the ranks' end
            _later(LAST_WORD_SECONDS, lambda: self._end_by_force(128 + number))
            return
        self._tell(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._drain.is_on:  # the same Ctrl-C, passed on
            return
        self._drain.begin()
        log.logger.info("draining: %d calls may take %g s to end", self._drain.num_calls, self._drain_timeout)
        self._drain_task = asyncio.ensure_future(self._end_after_drain())

    async def _end_after_drain(self) -> None:
        try:
            await self._drain.finish(self._drain_timeout)
        finally:
            self._stop()


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
