"""What a step leaves: tokens, which may still be on their way from the device, guesses and logprobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from engine.sampling import SampledLogprobs
from engine.verify import NO_GUESS, CommittedTokens


@dataclass(frozen=True)
class PromptLogprobs:
    """Logprobs of the prompt tokens at positions first_position, first_position + 1, ..."""

    first_position: int
    values: SampledLogprobs


class UnreadTokens(NamedTuple):
    """Host memory that holds what a step left once the event has happened; no event where it is there already."""

    state: CommittedTokens
    event: torch.cuda.Event | None


@dataclass
class ModelRunnerOutput:
    """One entry a request that sampled, in scheduled order: the tokens it commits, the draft's guesses of those after,
    and how many leading guesses equalled the tokens drawn, one that was not verified included.

    Logprobs are there where a request asked for them. A step on a GPU returns before it is done: `read` waits for it.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    guess_ids: list[list[int]] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)
    logprobs: dict[str, SampledLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    unread: UnreadTokens | None = None

    def read(self) -> list[list[int]]:
        if self.unread is not None:
            (state, event), self.unread = self.unread, None
            if event is not None:
                event.synchronize()
            accepted = state.accepted_S.tolist()
            self.token_ids = [row[: m + 1] for row, m in zip(state.tokens_SW.tolist(), accepted, strict=True)]
            self.guess_ids = [[g for g in row if g != NO_GUESS] for row in state.guesses_SK.tolist()]
            self.matched = state.matched_S.tolist()
        return self.token_ids


class ReadBuffers:
    """Host memory for what two steps left, in turn: one being read, one in flight. Pinned on a GPU's host."""

    def __init__(self, max_num_seqs: int, num_guesses: int, device: torch.device):
        states = [CommittedTokens.empty(max_num_seqs, num_guesses, torch.device("cpu")) for _ in range(2)]
        self._slots = [_pinned(state) for state in states] if device.type == "cuda" else states
        self._events = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else [None, None]
        self._turn = 0

    def start(self, state: CommittedTokens, count: int) -> UnreadTokens:
        """Sends the first `count` rows on their way."""
        self._turn ^= 1
        target, event = self._slots[self._turn].rows(count), self._events[self._turn]
        for mine, theirs in zip(target.tensors, state.rows(count).tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)
        if event is not None:
            event.record()
        return UnreadTokens(target, event)


def _pinned(state: CommittedTokens) -> CommittedTokens:
    return CommittedTokens(*(tensor.pin_memory() for tensor in state.tensors))
