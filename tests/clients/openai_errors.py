"""openai's own client: what it raises, and that it retries a full queue."""

from __future__ import annotations

import asyncio

import openai
from openai import AsyncOpenAI, OpenAI
from steps import SUM, Target, run

# The server of these checks lets 16 answers run and 32 wait.
NUM_CALLS, N = 6, 16


def connect(target: Target, **options) -> OpenAI:
    return OpenAI(**{"base_url": target.base, "api_key": target.key, "max_retries": 0, "timeout": 60} | options)


def raised(kind: type[openai.APIStatusError], client: OpenAI, **fields) -> openai.APIStatusError:
    try:
        client.chat.completions.create(**{"messages": SUM, "max_tokens": 4} | fields)
    except kind as error:
        assert error.request_id and error.body["message"] and error.type, error.body
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def kinds(target: Target) -> None:
    """wrong key, unknown model, bad field, too long: the client's own exceptions with param and code"""
    assert raised(openai.AuthenticationError, connect(target, api_key="wrong"), model=target.model).code
    assert raised(openai.NotFoundError, connect(target), model="no-such-model").code == "model_not_found"
    bad = raised(openai.BadRequestError, connect(target), model=target.model, temperature=9)
    assert bad.param == "temperature"
    long = [{"role": "user", "content": "a b c d e f g " * 60_000}]
    for stream in (False, True):
        error = raised(openai.BadRequestError, connect(target), model=target.model, messages=long, stream=stream)
        assert error.code == "context_length_exceeded", error.body


async def _flood(target: Target, retries: int) -> list[object]:
    async with AsyncOpenAI(base_url=target.base, api_key=target.key, max_retries=retries, timeout=120) as client:
        calls = [
            client.chat.completions.create(model=target.model, messages=SUM, n=N, max_tokens=8, temperature=1)
            for _ in range(NUM_CALLS)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)


def retries(target: Target) -> str:
    """more than may wait: RateLimitError with retry-after at once, and with retries every call succeeds"""
    refused = [result for result in asyncio.run(_flood(target, 0)) if isinstance(result, Exception)]
    assert refused and all(isinstance(error, openai.RateLimitError) for error in refused), refused
    waits = [int(error.response.headers["retry-after"]) for error in refused]
    assert min(waits) >= 1, waits
    results = asyncio.run(_flood(target, 20))
    failures = [result for result in results if isinstance(result, Exception)]
    assert not failures, failures
    assert all(len(result.choices) == N for result in results)
    return f"{len(refused)} of {NUM_CALLS} refused, retry-after {min(waits)} to {max(waits)} s, then none failed"


if __name__ == "__main__":
    run("openai", [kinds, retries])
