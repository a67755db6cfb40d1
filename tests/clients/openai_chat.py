"""openai's own client: chat, streams, structured output, text completions."""

from __future__ import annotations

import asyncio
import json

from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from steps import INSTANT, PERSON, SUM, SUM_ANSWER, Target, run


class Person(BaseModel):
    name: str
    age: int
    city: str


class Step(BaseModel):
    explanation: str
    output: str


class Sum(BaseModel):
    steps: list[Step]
    answer: int
    unit: str | None


def connect(target: Target) -> OpenAI:
    return OpenAI(base_url=target.base, api_key=target.key, max_retries=0, timeout=60)


def ask(target: Target, **fields):
    defaults = {"model": target.model, "messages": SUM, "temperature": 0, "max_tokens": 120, "extra_body": INSTANT}
    return connect(target).chat.completions.create(**defaults | fields)


def models(target: Target) -> str:
    """models: list and retrieve"""
    listed = connect(target).models.list().data
    assert [model.id for model in listed] == [target.model], listed
    assert connect(target).models.retrieve(target.model).id == target.model
    return f"max_model_len {listed[0].max_model_len}"


def chat(target: Target) -> str:
    """chat: content, finish reason, usage with its details, request id"""
    answer = ask(target)
    assert answer.choices[0].message.content == SUM_ANSWER, answer
    assert answer.choices[0].finish_reason == "stop" and answer._request_id, answer
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0
    return f"{usage.completion_tokens_details.accepted_prediction_tokens} draft tokens accepted"


def reasoning(target: Target) -> None:
    """chat: thinking apart from the answer, streamed and not, and sent back in the history"""
    message = ask(target, extra_body={}).choices[0].message
    assert message.content == SUM_ANSWER and "Result 42" in message.reasoning_content, message
    thought = ""
    for chunk in ask(target, extra_body={}, stream=True):
        thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert thought == message.reasoning_content, thought
    history = [*SUM, message.model_dump(), {"role": "user", "content": "How are you today?"}]
    assert ask(target, messages=history).choices[0].message.content


def raw_response(target: Target) -> None:
    """with_raw_response: headers, the request's own id echoed, then the parsed answer"""
    chats = connect(target).chat.completions.with_raw_response
    raw = chats.create(model=target.model, messages=SUM, max_tokens=4, extra_headers={"X-Request-Id": "client-check-7"})
    assert raw.headers["x-request-id"] == raw.request_id == "client-check-7", raw.headers
    assert raw.parse().choices[0].finish_reason == "length"


def stream(target: Target) -> None:
    """stream with include_usage: the text and the usage of the answer that is not streamed"""
    whole = ask(target)
    chunks = list(ask(target, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SUM_ANSWER
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def stream_helper(target: Target) -> None:
    """stream helper: its events add up to the final completion"""
    fields = {"model": target.model, "messages": SUM, "temperature": 0, "extra_body": INSTANT}
    with connect(target).chat.completions.stream(**fields) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert text == final.choices[0].message.content == SUM_ANSWER
    assert final.choices[0].finish_reason == "stop"


def in_parallel(target: Target) -> None:
    """async client: eight streams and eight plain calls at once, all alike"""

    async def plain(client: AsyncOpenAI, **fields) -> str:
        answer = await client.chat.completions.create(
            model=target.model, messages=SUM, temperature=0, extra_body=INSTANT, **fields
        )
        return answer.choices[0].message.content if not fields else await joined(answer)

    async def joined(chunks) -> str:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def gather() -> list[str]:
        async with AsyncOpenAI(base_url=target.base, api_key=target.key, max_retries=0, timeout=60) as client:
            calls = [plain(client) for _ in range(8)] + [plain(client, stream=True) for _ in range(8)]
            return await asyncio.gather(*calls)

    assert set(asyncio.run(gather())) == {SUM_ANSWER}


def sampling(target: Target) -> None:
    """n, seed, stop, logprobs: equal seeds give equal answers"""
    options = {"temperature": 1, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 2, "stop": ["zzz"]}
    first, second = ask(target, **options), ask(target, **options)
    assert [c.message.content for c in first.choices] == [c.message.content for c in second.choices]
    assert [c.index for c in first.choices] == [0, 1, 2]
    assert all(len(token.top_logprobs) == 2 for c in first.choices for token in c.logprobs.content)
    assert ask(target, stop=["="]).choices[0].message.content == "17 + 25 "


def parse_model(target: Target) -> str:
    """parse(): a pydantic model, flat and nested, with thinking and without"""
    fields = {"model": target.model, "messages": PERSON, "temperature": 0}
    person = connect(target).chat.completions.parse(response_format=Person, extra_body=INSTANT, **fields)
    assert person.choices[0].message.parsed == Person(name="Tom", age=30, city="Rome"), person
    thought = connect(target).chat.completions.parse(response_format=Person, **fields)
    assert isinstance(thought.choices[0].message.parsed, Person) and thought.choices[0].message.reasoning_content
    nested = connect(target).chat.completions.parse(response_format=Sum, extra_body=INSTANT, max_tokens=800, **fields)
    return f"nested: {nested.choices[0].message.parsed}"[:120]


def parse_stream(target: Target) -> None:
    """stream helper with a pydantic model: parsed at the end"""
    fields = {"model": target.model, "messages": PERSON, "temperature": 0, "extra_body": INSTANT}
    with connect(target).chat.completions.stream(response_format=Person, **fields) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Person) and "content.done" in kinds, kinds


def json_object(target: Target) -> str:
    """response_format json_object: the content is an object"""
    answer = ask(target, messages=PERSON, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    return answer.choices[0].message.content


def completions(target: Target) -> None:
    """completions: text, streamed, several prompts, ids, echo with logprobs"""
    client, fields = connect(target).completions, {"model": target.model, "temperature": 0, "max_tokens": 8}
    whole = client.create(prompt="The capital of France is", **fields)
    chunks = client.create(prompt="The capital of France is", stream=True, **fields)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    several = client.create(prompt=["The capital of France is", "One, two,"], **fields)
    assert [c.index for c in several.choices] == [0, 1] and several.choices[0].text == whole.choices[0].text
    scored = client.create(prompt=[100, 200, 300], echo=True, logprobs=1, **fields | {"max_tokens": 1})
    assert scored.choices[0].logprobs.token_logprobs[0] is None and len(scored.choices[0].logprobs.tokens) == 4


def close_early(target: Target) -> None:
    """a stream closed after its first chunk leaves nothing running"""
    fields = {"messages": [{"role": "user", "content": "Tell me a short story about a fox and a lamp."}]}
    chunks = ask(target, stream=True, max_tokens=900, **fields)
    next(chunks)
    chunks.close()
    load = connect(target).with_options(base_url=target.url)
    for _ in range(200):
        if load.get("/load", cast_to=dict)["num_requests_running"] == 0:
            return
    raise AssertionError("the request still runs")


if __name__ == "__main__":
    checks = [models, chat, reasoning, raw_response, stream, stream_helper, in_parallel, sampling]
    run("openai", [*checks, json_object, parse_model, parse_stream, completions, close_early])
