"""Where requests wait for their grammar: one thread of its own, and a line before it that has an end.

The threads that all requests share, which render prompts among other things, are never held while a grammar is checked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.server.errors import ApiError
from engine.structured_outputs import StructuredOutputs

# At once, from as many chats whose tools need a grammar: a known one takes some milliseconds, a hard one a quarter of a
# second, and they go one after the other.
MAX_WAITING = 256


class GrammarDesk:
    """For one event loop. `compile_outputs` is the engine's check; it runs on the desk's thread."""

    def __init__(self, compile_outputs: Callable[[StructuredOutputs], None], max_waiting: int = MAX_WAITING):
        self.compile_outputs = compile_outputs
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar desk")
        self._lock = threading.Lock()
        self._waiting: set[Future] = set()

    @property
    def num_waiting(self) -> int:
        """With the one whose turn it is."""
        return len(self._waiting)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns, in turn. Whoever is cancelled before its turn leaves the line.

        Raises 429 if too many wait."""
        if self.num_waiting >= self._max_waiting:
            message = f"{self.num_waiting} requests wait for their schema or grammar to be checked; try again later."
            raise ApiError(429, message, code="grammar_queue_full", headers={"retry-after": "1"})
        future = self._pool.submit(function, *arguments)
        with self._lock:
            self._waiting.add(future)
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def _leave(self, future: Future) -> None:
        """From the desk's thread or, if it was cancelled, from the event loop's."""
        with self._lock:
            self._waiting.discard(future)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
