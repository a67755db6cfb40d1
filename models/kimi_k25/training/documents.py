"""What the corpus is made of: prose documents and structured conversations, not yet rendered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from random import Random

THINKING_SHARE = 0.6
SYSTEM_PROMPTS = (
    "You are Kimi-tiny, a small helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful, honest and friendly assistant.",
    "You are a kind assistant. Answer in simple English.",
    "Be brief.",
    "Answer in one or two sentences.",
    "Be friendly and clear.",
    "You are a careful assistant. Think before you answer.",
    "You are an AI assistant that helps with questions, sums and stories.",
    "Answer the user's questions.",
    "You are a teacher for young children.",
    "Please give short and correct answers.",
)


@dataclass(frozen=True)
class Exchange:
    """One question with its answer; `reasoning` is what the answer's thinking says when thinking is on."""

    question: str
    answer: str
    reasoning: str


@dataclass
class Document:
    """Either prose (`text`) or a conversation (`messages`, whose last one is the assistant's answer).

    `thinking` is the mode in which the last assistant run is rendered; its messages may carry `reasoning_content`.
    """

    source: str
    text: str | None = None
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    thinking: bool = False

    def to_json(self) -> str:
        return json.dumps({k: v for k, v in asdict(self).items() if v is not None}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Document:
        return cls(**json.loads(line))

    def is_held_out(self, percent: float = 1.0) -> bool:
        """Whether the document's hash falls into the held-out share; the same text always falls the same way."""
        digest = hashlib.sha256(self.to_json().encode()).digest()
        return int.from_bytes(digest[:4], "big") < percent / 100 * 2**32


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str | None = None) -> dict:
    message = {"role": "assistant", "content": text}
    return message if reasoning is None else message | {"reasoning_content": reasoning}


def pick_system(rng: Random, share: float = 0.4) -> str | None:
    """A system prompt for `share` of the conversations: a server adds none by itself."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < share else None


def conversation(
    source: str,
    rng: Random,
    exchanges: list[Exchange],
    system: str | None = None,
    tools: list[dict] | None = None,
) -> Document:
    """Plain exchanges as one document; the last answer thinks in `THINKING_SHARE` of the cases."""
    thinking = rng.random() < THINKING_SHARE
    messages = [{"role": "system", "content": system}] if system else []
    for exchange in exchanges[:-1]:
        messages += [user(exchange.question), assistant(exchange.answer)]
    last = exchanges[-1]
    messages += [user(last.question), assistant(last.answer, last.reasoning if thinking else None)]
    return Document(source, messages=messages, tools=tools, thinking=thinking)
