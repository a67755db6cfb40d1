"""Requests whose grammar takes long: who waits for them, and who does not."""

import asyncio
import socket
import threading

import pytest

from engine.server.errors import ApiError
from engine.server.grammar_desk import GrammarDesk
from tests.engine.server.harness import make_core, request_bytes, serving
from tests.processes import until

WAITING = 40  # more than the threads that all requests share


@pytest.fixture
def slow():
    """A server whose engine checks a grammar only when its gate is released."""
    core = make_core()
    core.gate_of_checks, core.checked = threading.Semaphore(0), []

    def check(structured) -> None:
        core.checked.append(structured.regex)
        assert core.gate_of_checks.acquire(timeout=30)

    core.check_structured_outputs = check
    with serving(core) as running:
        yield running
        core.gate_of_checks.release(1000)


def test_hard_grammars_of_clients_that_hang_up_hold_nobody_else_up(slow):
    """One check runs on; the others leave the line with their clients."""
    core, desk, connections = slow.core, slow.client.grammar_desk, []
    for i in range(WAITING):
        connection = socket.create_connection(("127.0.0.1", slow.port))
        connection.sendall(request_bytes("/v1/completions", {"prompt": "a", "guided_regex": f"a{{{i + 1}}}"}))
        connections.append(connection)
    until(lambda: desk.num_waiting == WAITING, 20, "all requests wait for their grammar")
    assert slow.chat()["choices"][0]["message"]["content"] == "answer"
    for connection in connections:
        connection.close()
    until(lambda: desk.num_waiting <= 1, 20, "those that hung up have left")
    core.gate_of_checks.release(2)
    slow.complete(guided_regex="b")
    assert len(core.checked) == 2 and core.checked[-1] == "b"


def test_a_desk_takes_so_many_and_forgets_those_that_go():
    gate = threading.Event()

    async def use() -> list:
        desk = GrammarDesk(print, max_waiting=2)
        first = asyncio.ensure_future(desk.run(gate.wait, 30))
        second = asyncio.ensure_future(desk.run(lambda: "second"))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait") as refusal:
            await desk.run(lambda: "third")
        assert (refusal.value.status, refusal.value.headers) == (429, {"retry-after": "1"})
        second.cancel()
        await asyncio.sleep(0)
        fourth = asyncio.ensure_future(desk.run(lambda: "fourth"))
        await asyncio.sleep(0)
        gate.set()
        results = await asyncio.gather(first, second, fourth, return_exceptions=True)
        desk.close()
        return results

    first, second, fourth = asyncio.run(use())
    assert (first, fourth) == (True, "fourth") and isinstance(second, asyncio.CancelledError)
