"""A draft whose guesses follow a script: it knows what the target will say, and says that, or something else.

Its cache holds at position t the token t + 1, as a real draft's holds what was made of it. So it knows a request by the
tokens that lie in the cache, and finds none where an entry is stale, shifted, missing or another request's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import engine.model_loading
import engine.model_runner
from draft.base import DraftRows
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.verify import NO_GUESS
from tests.answers import Answer
from tests.rerun import RerunRecorder, record

Script = Callable[[int, int, int], int]
"""(what the target will say there, its position, which guess of the chain, from 0) -> the guess."""


def right(token: int, position: int, depth: int) -> int:
    return token


def wrong(token: int, position: int, depth: int) -> int:
    return token ^ 1


def sometimes(token: int, position: int, depth: int) -> int:
    """Right but for one place in five and one in seven."""
    return token if position % 5 and position % 7 else token ^ 1


def one_more_each_time(token: int, position: int, depth: int) -> int:
    """0, 1, 2, 3, ... right guesses in turn, by the place where the chain begins."""
    return token if depth < (position - depth) % 5 else token ^ 1


def nothing(token: int, position: int, depth: int) -> int:
    return NO_GUESS


def says(guess: int, at: int) -> Script:
    """This token as guess `at` of every chain, right ones around it."""
    return lambda token, position, depth: guess if depth == at else token


_PLACE = {"device": "cpu", "dtype": "float32", "num_threads": 1}


class ScriptedDrafter:
    """`texts`: whole requests, prompts included. num_known, num_lost: requests that it found in its cache, or not."""

    name, feature_layers, cache_width, max_positions, is_capturable = "scripted", (1, 2), 1, 4096, True
    weight_bytes = 0

    def __init__(self, hidden_size: int):
        self.script: Script = right
        self.texts: list[list[int]] = []
        self.num_known = self.num_lost = 0
        self._width, self._depth = hidden_size * len(self.feature_layers), 0

    def extend(
        self, features_TF: torch.Tensor, next_ids_T: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> DraftRows:
        count = batch.positions_T.shape[0]
        assert features_TF.shape == (count, self._width) and next_ids_T.shape == (count,)
        self._depth = 0
        return self._write(next_ids_T, batch, cache)

    def follow(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor
    ) -> DraftRows:
        return self._write(token_ids_N, batch, cache)

    def _write(self, token_ids_T: torch.Tensor, batch: ForwardBatch, cache: torch.Tensor) -> DraftRows:
        cache.view(-1)[batch.slots_T] = token_ids_T.to(cache.dtype) + 1
        return DraftRows(token_ids_T[:, None], batch.positions_T[:, None])

    def predict(self, rows: DraftRows, batch: ForwardBatch, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        guesses = [self._guess(n, batch, cache) for n in range(len(batch.seq_lens_N))]
        self._depth += 1
        device = batch.seq_lens_N.device
        return torch.tensor(guesses, device=device), torch.zeros(len(guesses), 1, device=device)

    def _guess(self, n: int, batch: ForwardBatch, cache: torch.Tensor) -> int:
        length = int(batch.seq_lens_N[n])
        if length == 0:
            return 0
        assert batch.positions_T[n] == length - 1
        blocks = batch.block_table_NB[n, : -(-length // cache.shape[1])]
        seen = [int(value) - 1 for value in cache[blocks].flatten()[:length]]
        known = next((text for text in self.texts if text[1 : length + 1] == seen and len(text) > length + 1), None)
        self.num_known += known is not None
        self.num_lost += known is None
        return 0 if known is None else self.script(known[length + 1], length + 1, self._depth)


def alone(config: EngineConfig) -> EngineCore:
    return start_engine(config)[0]


def build(
    checkpoint,
    num_draft_tokens: int | None,
    replays: bool = False,
    start: Callable[[EngineConfig], EngineCore] = alone,
    **settings,
) -> EngineCore:
    """An engine with a scripted draft, or without one. `replays`: its decodes replay ahead of their tokens.

    Its `drafter` and `recorder` are what the tests look at."""
    config = EngineConfig(str(checkpoint), **(_PLACE | settings))
    if num_draft_tokens is not None:
        config = replace(config, num_draft_tokens=num_draft_tokens, adaptive_draft_tokens=False)
    drafters: list[ScriptedDrafter] = []

    def load_draft(config, files, parallel, model, progress=None) -> ScriptedDrafter | None:
        if num_draft_tokens is None:
            return None
        drafters.append(ScriptedDrafter(files.model_config.hidden_size))
        return drafters[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model_loading, "load_draft", load_draft)
        patch.setattr(engine.model_runner, "load_draft", load_draft)
        core = start(config)
    core.drafter = drafters[-1] if drafters else None
    return _ahead(core, replays)


def build_real(checkpoint, draft, num_draft_tokens: int, replays: bool = False, **settings) -> EngineCore:
    """The same with a draft's own directory."""
    settings |= {"draft": str(draft), "num_draft_tokens": num_draft_tokens, "adaptive_draft_tokens": False}
    return _ahead(alone(EngineConfig(str(checkpoint), **(_PLACE | settings))), replays)


def _ahead(core: EngineCore, replays: bool) -> EngineCore:
    core.recorder = record(core.replica.runner) if replays else RerunRecorder()
    core.replica.overlap = replays
    return core


def teach(core: EngineCore, requests: list, answers: list[Answer], script: Script = right) -> None:
    """The draft knows these answers from now on, and what to do with them."""
    core.drafter.texts = [[*r[0], *a.token_ids] for r, a in zip(requests, answers, strict=True)]
    core.drafter.script = script
