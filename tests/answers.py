"""Collects what an EngineCore says, request by request, and checks the order in which it says it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from engine.core import EngineCore
from engine.request import CompletionDelta, RequestMetrics
from engine.sampling_params import SamplingParams


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list | None = None
    end: tuple | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)

    def take(self, delta: CompletionDelta) -> None:
        assert self.end is None, "nothing comes after the end"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "sent once"
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.end = (delta.finish_reason, delta.stop_reason)
            self.metrics = delta.metrics


def drain(core: EngineCore, answers=None, most: int = 5000) -> dict[tuple[str, int], Answer]:
    answers = defaultdict(Answer) if answers is None else answers
    for _ in range(most):
        if not core.has_unfinished():
            return answers
        for delta in core.step():
            answers[delta.request_id, delta.index].take(delta)
    raise AssertionError(f"unfinished after {most} steps")


def ask(core: EngineCore, *requests: tuple[list[int], SamplingParams]) -> list[Answer]:
    """All at once; the answers of index 0 in order."""
    for i, (prompt, params) in enumerate(requests):
        core.add_request(f"q{i}", prompt, params)
    answers = drain(core)
    return [answers[f"q{i}", 0] for i in range(len(requests))]
