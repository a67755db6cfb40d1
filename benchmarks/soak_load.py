"""What the soak asks of a server, and the small HTTP client that asks it: hundreds of streams must cost it little.

Requests are drawn from a seed: prompts that share long beginnings, greedy and sampled. Each has one right answer, found
out beforehand one at a time on an empty cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PATH = "/v1/completions"
ABORTS, BAD = 0.20, 0.05  # shares of all calls
BURST_SECONDS = 20.0  # half of the clients pause in the last quarter and come back at once
PATIENCE_SECONDS = 180.0
WORDS = (
    "fox",
    "ran",
    "over",
    "red",
    "hill",
    "saw",
    "seven",
    "birds",
    "near",
    "old",
    "water",
    "rain",
    "green",
    "stones",
)
JSON_TYPE = "application/json"
BAD_CALLS: tuple[tuple[Any, str, int], ...] = (
    (b"{not json", JSON_TYPE, 400),
    ({"prompt": ""}, JSON_TYPE, 400),
    ({"prompt": "a", "temperature": "hot"}, JSON_TYPE, 400),
    ({"prompt": "a", "max_tokens": -1}, JSON_TYPE, 400),
    ({"prompt": "a", "stop": 5}, JSON_TYPE, 400),
    ({"prompt": "a", "cache_salt": 7}, JSON_TYPE, 400),
    ({"prompt": "word " * 9000}, JSON_TYPE, 400),
    ({"prompt": "a", "model": "no-such-model"}, JSON_TYPE, 404),
    ({"prompt": "a"}, "text/plain", 415),
)


def draw_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Bodies of `count` different requests; four of five begin like others."""
    rng = random.Random(seed)

    def text(num_words: int) -> str:
        return " ".join(rng.choices(WORDS, k=num_words))

    beginnings = [text(num_words) for num_words in (20, 60, 60, 120, 120, 200)]
    bodies = []
    for index in range(count):
        shared = rng.choice(beginnings) if rng.random() < 0.8 else text(rng.randrange(1, 30))
        body = {
            "prompt": f"{shared} {text(rng.randrange(1, 12))} {index}",
            "max_tokens": rng.choice((1, 4, 12, 24, 48, 64)),
        }
        body |= {"temperature": 0} if rng.random() < 0.5 else {"temperature": 0.8, "seed": rng.getrandbits(32)}
        bodies.append(body | {"ignore_eos": rng.random() < 0.5, "stream": True, "return_token_ids": True})
    return bodies


@dataclass
class Answer:
    """What one call brought: of a stream its tokens, and how it ended; None where it did not end by itself."""

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None


async def call(
    port: int, path: str, body: Any, content_type: str = JSON_TYPE, method: str = "POST"
) -> tuple[int, bytes]:
    """Status and body of an answer that is no stream."""
    reader, writer, status = await _open(port, path, body, content_type, method)
    try:
        return status, await reader.read()
    finally:
        writer.close()


async def stream(port: int, body: Any, stop: Callable[[Answer], bool], on_tokens: Callable[[int], None]) -> Answer:
    """Reads a stream until its end, or hangs up once `stop(answer)`; `on_tokens` hears of what comes."""
    answer = Answer()
    reader, writer, answer.status = await _open(port, PATH, body)
    try:
        if answer.status != 200:
            answer.error = (await reader.read())[:500].decode(errors="replace")
            return answer
        while not stop(answer) and (event := await _next_event(reader)) is not None:
            if event == b"[DONE]":
                answer.done = True
                break
            _take(answer, json.loads(event), on_tokens)
        return answer
    finally:
        writer.close()


def _take(answer: Answer, event: dict[str, Any], on_tokens: Callable[[int], None]) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])
        return
    (choice,) = event["choices"]
    answer.token_ids += choice["token_ids"]
    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    on_tokens(len(choice["token_ids"]))


async def _open(
    port: int, path: str, body: Any, content_type: str = JSON_TYPE, method: str = "POST"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: {content_type}\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
        return reader, writer, status
    except BaseException:
        writer.close()
        raise


async def _next_event(reader: asyncio.StreamReader) -> bytes | None:
    """The data of the next event, which the server sends as one chunk; None at the end."""
    size = int(await reader.readuntil(b"\r\n"), 16)
    chunk = await reader.readexactly(size + 2)
    return chunk[:-2].removeprefix(b"data: ").strip() if size else None


class Load:
    """`streams` clients that ask for what `bodies` hold until told to stop; counts what came of it."""

    def __init__(self, port: int, bodies: list[dict[str, Any]], seed: int):
        self.port, self.bodies, self.seed = port, bodies, seed
        self.expected: list[Answer] = []
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.num_tokens = self.num_open = 0
        self.longest_stall = self.seconds = 0.0
        self._last_token = time.monotonic()

    async def find_answers(self) -> None:
        for body in self.bodies:
            await call(self.port, "/flush_cache", {})
            answer = await stream(self.port, body, lambda _: False, lambda _: None)
            if not answer.done or answer.error:
                raise SystemExit(f"error: no answer to {body}: {answer}")
            self.expected.append(answer)

    async def run(self, streams: int, seconds: float) -> None:
        """Nobody asks after `seconds`, but what was asked is read to its end. Every bad call is made once at least."""
        began = self._last_token = time.monotonic()
        clients = [self._client(number, began + seconds) for number in range(streams)]
        await asyncio.gather(*clients, *(self._bad(*bad) for bad in BAD_CALLS))
        self.seconds = time.monotonic() - began

    async def _client(self, number: int, end: float) -> None:
        rng = random.Random(self.seed * 100_003 + number)
        while time.monotonic() < end:
            await self._pause(number, end)
            kind = rng.random()
            try:
                await asyncio.wait_for(
                    self._bad(*rng.choice(BAD_CALLS)) if kind < BAD else self._ask(rng, kind < BAD + ABORTS),
                    PATIENCE_SECONDS,
                )
            except (OSError, ValueError, EOFError, TimeoutError) as error:
                self._note("failed", {"reason": f"{type(error).__name__}: {error}"})

    async def _pause(self, number: int, end: float) -> None:
        phase = time.monotonic() % BURST_SECONDS
        if number % 2 and phase > 0.75 * BURST_SECONDS:
            await asyncio.sleep(max(min(BURST_SECONDS - phase, end - time.monotonic()), 0))

    async def _bad(self, body: Any, content_type: str, expected: int) -> None:
        status, _ = await call(self.port, PATH, body, content_type)
        self.statuses[status] += 1
        self.counts["bad"] += 1
        if status != expected:
            self._note("wrongly taken", {"body": str(body)[:80], "status": status})

    async def _ask(self, rng: random.Random, leaves: bool) -> None:
        index = rng.randrange(len(self.bodies))
        expected = self.expected[index]
        most = rng.randrange(len(expected.token_ids) + 1) if leaves else None
        self.num_open += 1
        asked = stream(
            self.port, self.bodies[index], lambda a: most is not None and len(a.token_ids) >= most, self._token
        )
        try:
            # Some leave before anything has come: while they wait, or in the middle of their prompt.
            answer = await (asyncio.wait_for(asked, rng.random()) if most == 0 else asked)
        except TimeoutError:
            answer = Answer(200)
        finally:
            self.num_open -= 1
        self.statuses[answer.status] += 1
        self._judge(index, answer, expected, leaves)

    def _judge(self, index: int, answer: Answer, expected: Answer, leaves: bool) -> None:
        """One that left must have had the beginning of the right answer."""
        got = answer.token_ids
        whole = (answer.done, answer.finish_reason) == (True, expected.finish_reason) and got == expected.token_ids
        beginning = leaves and got == expected.token_ids[: len(got)]
        self.counts["left" if leaves and not answer.done else "completed"] += 1
        if answer.status != 200 or answer.error or not (whole or beginning):
            self._note("different", {"request": index, "answer": answer.__dict__, "expected": expected.__dict__})

    def _note(self, kind: str, what: dict[str, Any]) -> None:
        self.counts[kind] += 1
        if len(self.wrong) < 20:
            self.wrong.append({"kind": kind} | what)

    def _token(self, count: int) -> None:
        self.num_tokens += count
        self.look(had_token=True)

    def look(self, had_token: bool = False) -> None:
        """Measures how long no token has come though somebody waits for one."""
        now = time.monotonic()
        if had_token or not self.num_open:
            self._last_token, stall = now, now - self._last_token if self.num_open else 0.0
        else:
            stall = now - self._last_token
        self.longest_stall = max(self.longest_stall, stall)
