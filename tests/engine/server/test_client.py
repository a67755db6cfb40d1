"""The bridge to the core's thread: merging, aborts, failure, close, and no work while idle."""

import asyncio
import threading

import pytest

from engine.errors import EngineDeadError, InvalidRequestError
from engine.sampling_params import SamplingParams
from engine.server import client as client_module
from engine.server.client import EngineClient
from tests.engine.server.harness import emit, make_core

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, logprobs=1)


@pytest.fixture
def core():
    return make_core()


@pytest.fixture
def client(core):
    client = EngineClient(core)
    yield client
    client.close()
    assert core.is_shut_down


async def collect(client, request_id="r", params=None, prompt=(1, 2)):
    stream = await client.generate(request_id, list(prompt), params or SamplingParams(max_tokens=None))
    return [delta async for delta in stream]


def test_one_thread_alone_touches_the_core(client, core):
    async def many():
        return await asyncio.gather(*(collect(client, f"r{i}") for i in range(20)))

    for deltas in asyncio.run(many()):
        assert "".join(delta.text for delta in deltas) == "thoughts</think>answer"
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert core.threads == {client._thread.ident}


def test_a_slow_reader_finds_one_merged_delta_per_choice(client, core):
    core.scripts.extend([emit("ab" * 500), emit("cd" * 500)])

    async def read():
        stream = await client.generate("r", [1], SamplingParams(n=2, max_tokens=None, logprobs=1, prompt_logprobs=1))
        while stream._num_running:
            await asyncio.sleep(0)
        return [delta async for delta in stream]

    first, second = asyncio.run(read())
    assert (first.text, second.text) == ("ab" * 500, "cd" * 500)
    assert len(first.token_ids) == len(first.logprobs) == 1001
    assert first.prompt_logprobs is not None and first.metrics is not None and first.finish_reason == "stop"


def test_refusal_is_for_its_request_alone(client, core):
    async def both():
        return await asyncio.gather(
            collect(client, "bad", prompt=[10**6]), collect(client, "good"), return_exceptions=True
        )

    refused, served = asyncio.run(both())
    assert isinstance(refused, InvalidRequestError) and served[-1].finish_reason == "stop"
    assert client.is_healthy and not core.running


def test_closing_a_stream_frees_its_request(client, core):
    core.default_script = [97] * 10**6

    async def read():
        stream = await client.generate("r", [1], ENDLESS)
        async for _ in stream:
            break
        stream.close()
        stream.close()

    asyncio.run(read())
    core.wait_for(lambda: core.aborted == ["r"])
    assert not core.running and not client._running


def test_cancelled_while_waiting_to_be_accepted(client, core):
    core.gate = threading.Semaphore(0)
    core.default_script = [97] * 1000

    async def read():
        first = await client.generate("first", [1], ENDLESS)
        task = asyncio.ensure_future(client.generate("second", [1], ENDLESS))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        first.close()

    asyncio.run(read())
    core.gate = None
    core.wait_for(lambda: sorted(core.aborted) == ["first", "second"])
    asyncio.run(collect(client, "third", SamplingParams(max_tokens=2)))
    assert not client._running and not client._entering


def test_a_closed_loop_frees_its_requests(client, core):
    core.default_script = [97] * 10**6

    async def start():
        await client.generate("r", [1], ENDLESS)

    asyncio.run(start())
    core.wait_for(lambda: core.aborted == ["r"])
    assert not client._running and not client._entering


def test_failure_reaches_everyone_once(core):
    reasons = []
    client = EngineClient(core, on_error=reasons.append)
    core.gate = threading.Semaphore(0)

    async def run():
        tasks = [asyncio.ensure_future(collect(client, f"r{i}")) for i in range(5)]
        while len(client._running) < 5:
            await asyncio.sleep(0.001)
        core.fail_at = core.num_steps + 1
        core.gate.release()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        with pytest.raises(EngineDeadError):
            await collect(client, "late")

    asyncio.run(run())
    client.close()
    assert not client.is_healthy and [str(r) for r in reasons] == [str(client.error)] and core.is_shut_down


def test_a_rank_lost_while_idle_is_noticed_at_once(core):
    noticed = threading.Event()
    client = EngineClient(core, on_error=lambda reason: noticed.set())
    asyncio.run(collect(client))
    assert client.is_healthy
    core.lose_a_rank()
    assert noticed.wait(10) and not client.is_healthy and "rank 1" in str(client.error)
    client.close()


def test_a_core_that_hangs_in_its_step_is_spoken_for(core, monkeypatch):
    """Its thread can say nothing; clients and the server learn of the failure all the same."""
    monkeypatch.setattr(client_module, "STUCK_SECONDS", 0.2)
    core.gate = threading.Semaphore(0)
    errors, noticed = [], threading.Event()

    def note(error):
        errors.append(error)
        noticed.set()

    client = EngineClient(core, on_error=note)

    async def run():
        task = asyncio.ensure_future(collect(client, "r", ENDLESS))
        while not client._running:
            await asyncio.sleep(0.001)
        core.lose_a_rank()
        assert not client.is_healthy, "at once"
        with pytest.raises(EngineDeadError):
            await task

    asyncio.run(run())
    assert noticed.wait(10) and "rank 1" in str(client.error)
    client.close()
    core.gate.release(1000)
    client._thread.join(10)
    assert len(errors) == 1, "and once"


def test_close_ends_running_requests(core):
    client = EngineClient(core)
    core.default_script = [97] * 10**6

    async def run():
        task = asyncio.ensure_future(collect(client, "r", ENDLESS))
        while not core.num_steps:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(client.close)
        with pytest.raises(EngineDeadError):
            await task

    asyncio.run(run())
    assert core.is_shut_down and not client.is_healthy


def test_an_idle_client_does_nothing(core):
    calls = 0
    original = core.has_unfinished

    def counted():
        nonlocal calls
        calls += 1
        return original()

    core.has_unfinished = counted
    client = EngineClient(core)
    asyncio.run(collect(client))
    threading.Event().wait(0.1)
    client.close()
    assert calls <= 2 * core.num_steps + 6
