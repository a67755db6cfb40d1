"""What a step leaves: tokens, which may still be on their way from the device, and logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.sampling import SampledLogprobs


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens at positions first_position, first_position + 1, ..."""

    first_position: int
    values: SampledLogprobs


class UnreadTokens(NamedTuple):
    """Host memory that holds a step's tokens once the event has happened; no event where they are there already."""

    tokens_S: torch.Tensor
    event: torch.cuda.Event | None


@dataclass
class ModelRunnerOutput:
    """token_ids: one a request that sampled, in scheduled order. Logprobs are there where a request asked for them.

    A step on a GPU returns before it is done: `read` waits for its tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, SampledLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    unread: UnreadTokens | None = None

    def read(self) -> list[int]:
        if self.unread is not None:
            if self.unread.event is not None:
                self.unread.event.synchronize()
            self.token_ids, self.unread = self.unread.tokens_S.tolist(), None
        return self.token_ids


class ReadBuffers:
    """Pinned memory for the tokens of two steps in turn: one being read, one in flight."""

    def __init__(self, max_num_seqs: int):
        self._slots = [
            UnreadTokens(torch.empty(max_num_seqs, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ]
        self._turn = 0

    def start(self, tokens_S: torch.Tensor) -> UnreadTokens:
        self._turn ^= 1
        whole, event = self._slots[self._turn]
        target = whole[: tokens_S.shape[0]]
        target.copy_(tokens_S, non_blocking=True)
        event.record()
        return UnreadTokens(target, event)
