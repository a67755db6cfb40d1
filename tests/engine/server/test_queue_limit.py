"""How many answers may wait, what the next one is told, and that nobody slips past the limit."""

import asyncio
import threading

import openai
import pytest

from engine.sampling_params import SamplingParams
from engine.server.client import EngineClient, Job
from engine.server.errors import ApiError
from engine.server.queue_limit import MOST_SECONDS, WaitingLine
from tests.engine.server.harness import HI, error_of, make_core, serving
from tests.processes import until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waiting_line(limit: int, *begins: tuple[float, int], waiting: int) -> tuple[WaitingLine, Clock]:
    """One in which `waiting` answers wait, after so many began each time, so many seconds later."""
    clock = Clock()
    line = WaitingLine(limit, clock=clock)
    line.enter(waiting)
    line.leave_entrance(waiting)
    total = 0
    line.follow_core(waiting, 0, 0)
    for seconds, count in begins:
        clock.now += seconds
        total += count
        line.follow_core(waiting, total, 0)
    return line, clock


@pytest.mark.parametrize(
    ("begins", "elapsed", "expected"),
    [
        ([], 0.0, 1),
        ([], 7.5, 8),
        ([(2.0, 1)] * 5, 0.0, 16),  # 2 s each, 8 wait
        ([(2.0, 4)] * 5, 0.0, 4),
        ([(0.001, 4)], 0.0, 2),  # a rate seen for a moment counts as one seen for a second
        ([(2.0, 1)] * 5, 10.0, 32),  # nothing has begun since: slower than it was
        ([(5000.0, 1)], 0.0, MOST_SECONDS),
    ],
)
def test_when_to_come_back(begins, elapsed, expected):
    line, clock = waiting_line(8, *begins, waiting=8)
    clock.now += elapsed
    assert line.retry_after() == expected
    with pytest.raises(ApiError) as refused:
        line.enter(1)
    assert refused.value.status == 429 and refused.value.headers == {"retry-after": str(expected)}


def test_a_quiet_hour_does_not_make_the_server_slow():
    line, clock = waiting_line(8, (2.0, 1), (2.0, 1), waiting=8)
    line.follow_core(0, 10, 0)
    clock.now += 3600
    line.enter(4)
    assert line.retry_after() == 2, "10 began in 4 s, 4 wait"


def test_old_begins_are_forgotten():
    line, _ = waiting_line(8, *[(100.0, 1)] * 5, *[(0.5, 1)] * 64, waiting=8)
    assert line.retry_after() == 4


def test_jobs_enter_together_or_not_at_all():
    """A call of several prompts takes all of its places at once, however many loops and threads ask."""
    core = make_core(gate=threading.Semaphore(0), max_num_seqs=1)
    client = EngineClient(core, max_queued_requests=9)
    entered, barrier = [], threading.Barrier(8)

    def ask(number: int) -> None:
        async def call() -> None:
            jobs = [Job(f"{number}-{i}", [1], SamplingParams(n=2)) for i in range(2)]
            barrier.wait(10)
            try:
                await client.generate_all(jobs)
                entered.append(number)
            except ApiError as error:
                assert error.status == 429 and error.code == "queue_full"

        asyncio.run(call())

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(entered) == 2, "4 answers each, 10 places"
    client.close()


@pytest.mark.parametrize(
    ("waiting", "begun", "free", "count", "enters"),
    [
        (0, 0, 4, 14, True),  # idle: four begin at once, ten wait
        (0, 0, 4, 15, False),
        (13, 0, 4, 1, True),
        (14, 0, 4, 1, False),
        (10, 4, 0, 1, False),  # the same answers, four of them begun
        (9, 4, 0, 1, True),
        (9, 4, 1, 2, True),  # one of the four has ended
        (10, 2, 0, 1, False),  # seats that memory keeps empty are not free
    ],
)
def test_answers_with_a_free_seat_ahead_do_not_count(waiting, begun, free, count, enters):
    line = WaitingLine(10, num_seats=4)
    line.follow_core(waiting, begun, free)
    if enters:
        line.enter(count)
        assert line.num_waiting == waiting + count
    else:
        with pytest.raises(ApiError) as refused:
            line.enter(count)
        assert refused.value.status == (400 if count > 14 else 429) and line.num_waiting == waiting


@pytest.fixture(scope="module")
def full():
    """A server with 2 seats and 1 place to wait whose core begins nothing until its gate is released."""
    core = make_core(gate=threading.Semaphore(0), max_num_seqs=2)
    with serving(core, max_queued_requests=1) as running:
        yield running
        core.gate.release(10**4)


def test_answers_wait_by_number_and_the_rest_is_refused(full):
    core, answers, before = full.core, [], full.client.rejected["queue_full"]
    core.gate = threading.Semaphore(0)
    asked = [{"messages": HI, "n": 2}, {"messages": HI, "stream": True}]
    calls = [threading.Thread(target=lambda body=body: answers.append(full.post(CHAT, body))) for body in asked]
    for call in calls:
        call.start()
    core.wait_for(lambda: len(core.running) == 3)
    with full.http() as http:
        for path, body in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a", "stream": True})):
            refused = http.post(path, json=body)
            error = error_of(refused, 429)
            assert error["type"] == "rate_limit_error" and error["code"] == "queue_full"
            assert "3 answers wait, 2 of them may begin at once and 1 more may wait" in error["message"]
            assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
        assert "turnout_request_rejected_total" in http.get("/metrics").text
        assert http.get("/load").json()["max_queued_requests"] == 1
    assert full.client.rejected["queue_full"] - before == 2
    core.gate.release(10**4)
    for call in calls:
        call.join(20)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert full.client._line.num_waiting == 0
    assert full.post(CHAT, {"messages": HI}).status_code == 200


def test_what_can_never_wait_is_no_matter_of_load(full):
    """Trying again would not help: 400, not 429."""
    for path, body in ((CHAT, {"messages": HI, "n": 4}), (COMPLETIONS, {"prompt": ["a", "b"], "n": 2})):
        error = error_of(full.post(path, body), 400)
        assert error["code"] == "too_many_answers"
        assert "asks for 4" in error["message"] and "3 may run and wait" in error["message"]


def test_aborts_give_places_back():
    core = make_core(gate=threading.Semaphore(0), max_num_seqs=1)
    client = EngineClient(core, max_queued_requests=1)

    async def fill_and_leave() -> None:
        streams = [await client.generate(f"r{i}", [1], SamplingParams()) for i in range(2)]
        with pytest.raises(ApiError):
            await client.generate("r2", [1], SamplingParams())
        for stream in streams:
            stream.close()

    for _ in range(3):
        asyncio.run(fill_and_leave())
        until(lambda: not client._line.num_waiting, 10, "nobody waits")
    client.close()
    assert not core.running


def test_the_sdk_comes_back_when_told(full):
    """One retry, after the seconds that it was told."""
    core, before = full.core, full.client.rejected["queue_full"]
    core.gate = threading.Semaphore(0)
    holder = threading.Thread(target=full.post, args=(CHAT, {"messages": HI, "n": 3}))
    holder.start()
    core.wait_for(lambda: len(core.running) == 3)

    def make_room() -> None:
        until(lambda: full.client.rejected["queue_full"] > before, 20, "the SDK has been sent away")
        core.gate.release(10**4)

    releaser = threading.Thread(target=make_room)
    releaser.start()
    client = openai.OpenAI(base_url=f"{full.url}/v1", api_key="unused", max_retries=1, timeout=20)
    answer = client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "answer" and full.client.rejected["queue_full"] == before + 1
    for thread in (holder, releaser):
        thread.join(20)
