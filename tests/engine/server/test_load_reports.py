"""What users of other servers reported under load, over the real engine with clients on real sockets.

Numbers are those of the reports where that takes little time, else smaller, with the full ones under the mark `slow`.
"""

import random
import socket
import threading
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.launch import start_engine
from tests.checkpoints import SMALL, build_checkpoint
from tests.engine.server.harness import RunningServer, request_bytes, serving
from tests.engine.server.load import (
    COMPLETIONS,
    asking,
    cold_answers,
    leaving,
    resident_bytes,
    run_clients,
    settle,
    text_of,
)
from tests.processes import until

GREEDY = {"temperature": 0, "ignore_eos": True}
SYSTEM = "You are a helpful assistant of few words. Follow the rules and say nothing that was not asked. " * 2
BLOCK_BYTES = 4 * SMALL.num_hidden_layers * 64 * (SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)


def start(directory, num_blocks: int = 48, **settings):
    memory = (num_blocks + 0.5) * BLOCK_BYTES / 2**30
    limits = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "kv_cache_memory_gb": memory}
    return start_engine(EngineConfig(str(directory), device="cpu", num_threads=1, **limits | settings))[0]


def numbers(few: int, reported: int) -> list:
    return [few, pytest.param(reported, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def shared(directory):
    """So few blocks that requests push each other out and cached prefixes are given up."""
    with serving(start(directory)) as running:
        yield running


@pytest.fixture
def server(shared):
    yield shared
    settle(shared)


def samples(server: RunningServer) -> dict[str, float]:
    """Name and label value -> value."""
    families = text_string_to_metric_families(server.http().get("/metrics").text)
    return {" ".join([s.name, *s.labels.values()]): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("count", numbers(96, 256))
def test_b115_blocks_add_up_after_many_clients(server, count):
    """256: shared prefixes, mixed lengths, a fifth hang up: free + cached = all, and /metrics shows it."""
    rng = random.Random(115)
    clients = []
    for _ in range(count):
        prompt = SYSTEM[: rng.randrange(20, 190)] + str(rng.randrange(50))
        body = GREEDY | {"prompt": prompt, "max_tokens": rng.randrange(1, 10), "stream": rng.random() < 0.5}
        clients.append(leaving(body, rng.random()) if rng.random() < 0.2 else asking(body))
    answers = [answer for answer in run_clients(server, *clients) if answer is not None]
    assert answers and all(text_of(answer) is not None for answer in answers)
    settle(server)
    shown = samples(server)
    blocks = [shown[f"turnout_kv_cache_blocks {state}"] for state in ("free", "cached", "held")]
    assert sum(blocks) == server.core.replica.scheduler.kv_cache.pool.num_usable and blocks[1] > 0 == blocks[2]
    assert 0 < shown["turnout_prefix_cache_hit_tokens_total"] < shown["turnout_prefix_cache_query_tokens_total"]


def test_b117_leaving_and_timing_out_in_the_queue_leave_nothing(directory):
    """Three hang up while they wait; then 50 requests hit the queue limit and the queue timeout."""
    core = start(directory, max_num_seqs=1, queue_timeout=1.0)
    with serving(core, max_queued_requests=20) as server:
        body = GREEDY | {"prompt": SYSTEM, "max_tokens": 120}
        in_line = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        for number, connection in enumerate(in_line):
            connection.sendall(request_bytes(COMPLETIONS, body | {"max_tokens": 400}))
            until(lambda number=number: core.num_begun + core.num_unbegun > number, 20, "it has entered")
        for connection in reversed(in_line):
            connection.close()
        settle(server)
        assert core.num_begun == 1 and core.stats().num_finished["abort"] == 4
        answers = run_clients(server, *[asking(body)] * 50)
        statuses = Counter(answer.status_code for answer in answers)
        assert set(statuses) == {200, 429, 503}, statuses
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code != 200)
        codes = {a.json()["error"]["code"] for a in answers if a.status_code != 200}
        assert codes == {"queue_full", "queue_timeout"}
        settle(server)
        shown = samples(server)
        assert shown["turnout_request_rejected_total queue_full"] == statuses[429]
        assert shown["turnout_request_rejected_total queue_timeout"] == statuses[503]
        assert text_of(server.post(COMPLETIONS, body | {"max_tokens": 3}))


@pytest.mark.parametrize("count", numbers(8, 20))
def test_b120_a_shared_beginning_brings_nothing_else_along(server, count):
    """20 pairs of prompts that share the system message alone, alternating: each as on an empty cache."""
    pairs = [
        [SYSTEM + f"{who} {i}: {what * (i + 1)}" for who, what in (("Ann", "x y "), ("Bob", "z "))]
        for i in range(count)
    ]
    bodies = [GREEDY | {"prompt": prompt, "max_tokens": 8} for pair in pairs for prompt in pair]
    cold = cold_answers(server, bodies)
    with server.http() as http:
        http.post("/flush_cache")
        answers = [http.post(COMPLETIONS, json=body) for body in bodies]
    assert [text_of(answer) for answer in answers] == cold
    cached = [a.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0 and min(cached[1:]) >= 64, "the system message was found every time"


def burst(server: RunningServer, count: int) -> Counter:
    """Statuses of `count` clients who come all at once while the engine is idle, and stays so until the last is sent
    away: as many as may run and wait get in."""
    core, step, refused, seen = server.core, server.core.step, threading.Event(), Counter()

    def held_step():
        assert refused.wait(30)
        return step()

    async def client(http: httpx.AsyncClient) -> None:
        response = await http.post(COMPLETIONS, json=GREEDY | {"prompt": "a", "max_tokens": 5})
        seen[response.status_code] += 1
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
        if seen[429] == count - 14:
            refused.set()

    core.step = held_step
    run_clients(server, *[client] * count)
    core.step = step
    return seen


@pytest.mark.parametrize("count", numbers(100, 500))
def test_b121_clients_at_once(directory, count):
    """500: 4 run, 10 wait, the rest is sent away at once; memory does not grow with those sent away."""
    with serving(start(directory, max_num_seqs=4), max_queued_requests=10) as server:
        grown = []
        for _ in range(2):
            before = resident_bytes()
            assert burst(server, count) == {200: 14, 429: count - 14}
            settle(server)
            grown.append(resident_bytes() - before)
        assert grown[-1] < 8 * 2**20, grown
        assert server.client.rejected["queue_full"] == 2 * (count - 14)


def test_b161_clients_killed_in_prefill_keep_no_place(server):
    """Twice as many as may run, in the middle of their prompts; then one request."""
    body = GREEDY | {"max_tokens": 50, "stream": True}
    clients = [leaving(body | {"prompt": f"{i} " + SYSTEM * 2}, 0.05 + 0.005 * i) for i in range(32)]
    run_clients(server, *clients)
    assert text_of(server.post(COMPLETIONS, GREEDY | {"prompt": "a", "max_tokens": 3}))
    settle(server)
    assert samples(server)["turnout_num_requests_running"] == 0


@pytest.mark.parametrize("count", numbers(150, 10_000))
def test_b162_short_requests_leave_no_memory_behind(server, count):
    body = GREEDY | {"prompt": "a", "max_tokens": 1}
    with server.http() as http:

        def ask(times: int) -> int:
            for _ in range(times):
                assert http.post(COMPLETIONS, json=body).status_code == 200
            return resident_bytes()

        first = ask(count // 3)
        last = ask(count - count // 3)
    settle(server)
    assert last - first < 4 * 2**20, (first, last)


@pytest.mark.parametrize("count", numbers(15, 50))
def test_b163_the_next_turn_right_after_a_disconnect(server, count):
    """50 streams closed after their first chunk, each followed by the next turn at once."""
    turns = [GREEDY | {"prompt": SYSTEM + f" turn {i}", "max_tokens": 4} for i in range(count)]
    alone = cold_answers(server, turns)
    with server.http() as http:
        for turn, expected in zip(turns, alone, strict=True):
            endless = GREEDY | {"prompt": SYSTEM, "max_tokens": 300, "stream": True}
            with http.stream("POST", COMPLETIONS, json=endless) as response:
                next(response.iter_bytes())
            assert text_of(http.post(COMPLETIONS, json=turn)) == expected


@pytest.mark.parametrize("count", numbers(12, 32))
def test_b164_answers_belong_to_their_prompts(server, count):
    """32 prompts at once, streamed and not."""
    prompts = [f"{SYSTEM}Repeat this code word: {random.Random(i).getrandbits(40):x}" for i in range(count)]
    bodies = [GREEDY | {"prompt": prompt, "max_tokens": 12, "stream": i % 2 == 0} for i, prompt in enumerate(prompts)]
    alone = cold_answers(server, bodies)
    assert [text_of(answer) for answer in run_clients(server, *map(asking, bodies))] == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("count", numbers(16, 100))
def test_b165_nothing_of_an_aborted_request_turns_up_in_the_next(server, count):
    """100 pairs of an abort in mid-prefill and another request, in 4 parallel clients."""
    bodies = [GREEDY | {"prompt": SYSTEM + f"secret? {i}", "max_tokens": 4} for i in range(count)]
    cold = cold_answers(server, bodies)

    def pairs(number: int):
        async def client(http: httpx.AsyncClient) -> list[str]:
            texts = []
            for i in range(number, count, 4):
                aborted = GREEDY | {"prompt": SYSTEM + f"secret {i} " * 20, "max_tokens": 100}
                await leaving(aborted, 0.002 * (i % 5))(http)
                texts.append(text_of(await asking(bodies[i])(http)))
            return texts

        return client

    for number, texts in enumerate(run_clients(server, *map(pairs, range(4)))):
        assert texts == cold[number::4]
