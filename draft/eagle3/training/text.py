"""Prompts on disk, and the text that the target makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draft.eagle3.training.target import Target


@dataclass(frozen=True)
class Prompts:
    """Token ids of prompts one after the other: tokens uint16 [T], starts int64 [P + 1], source uint8 [P] as an index
    into `sources`, held_out bool [P]."""

    tokens: np.ndarray
    starts: np.ndarray
    source: np.ndarray
    held_out: np.ndarray
    sources: list[str]

    @classmethod
    def load(cls, path: Path) -> Prompts:
        with np.load(path, allow_pickle=False) as arrays:
            parts = {name: arrays[name] for name in ("tokens", "starts", "source", "held_out")}
            return cls(**parts, sources=arrays["sources"].tolist())

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def ids(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]


@dataclass(frozen=True)
class Text:
    """Prompts with the target's continuations: tokens uint16 [T], starts int64 [N + 1], prompt_lengths int64 [N],
    source uint8 [N]."""

    tokens: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    source: np.ndarray

    @classmethod
    def join(cls, parts: list[tuple[np.ndarray, np.ndarray, int]]) -> Text:
        """Of (prompt, continuation, source)."""
        lengths = [len(prompt) + len(continuation) for prompt, continuation, _ in parts]
        return cls(
            np.concatenate([ids for prompt, continuation, _ in parts for ids in (prompt, continuation)]),
            np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
            np.asarray([len(prompt) for prompt, _, _ in parts], np.int64),
            np.asarray([source for _, _, source in parts], np.uint8),
        )

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def written(self) -> np.ndarray:
        """Whether each token is the target's own, bool [T]."""
        offsets = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths())
        return offsets >= np.repeat(self.prompt_lengths, self.lengths())


@dataclass(frozen=True)
class Writing:
    """How the target writes. Batches are of like prompts; `seconds` ends the writing after the batch in which they
    run out."""

    max_new: int = 192
    batch: int = 4096
    greedy_share: float = 0.75
    temperatures: tuple[float, float] = (0.7, 1.0)
    seconds: float = 90.0
    max_tokens: int = 20_000_000


def write_text(
    target: Target,
    prompts: Prompts,
    chosen: np.ndarray,
    writing: Writing,
    seed: int,
    log: Callable[[str], None] = lambda line: None,
) -> Text:
    """Continues the `chosen` prompts (indices), in batches of like length whose order is random."""
    rng = np.random.default_rng(seed)
    batches = _batches(prompts.lengths(), chosen, writing.batch, rng)
    parts: list[tuple[np.ndarray, np.ndarray, int]] = []
    start, tokens, written = time.monotonic(), 0, 0
    for number, batch in enumerate(batches):
        temperatures = np.where(
            rng.random(len(batch)) < writing.greedy_share, 0.0, rng.uniform(*writing.temperatures, len(batch))
        )
        ids = [prompts.ids(i) for i in batch]
        continuations = target.generate(ids, writing.max_new, temperatures.tolist(), seed + number)
        parts += zip(ids, continuations, prompts.source[batch].tolist(), strict=True)
        written += sum(map(len, continuations))
        tokens += sum(map(len, continuations)) + sum(map(len, ids))
        seconds = time.monotonic() - start
        log(f"written {written:,} tokens to {len(parts):,} prompts, {written / seconds:,.0f} tokens/s")
        if seconds > writing.seconds or tokens > writing.max_tokens:
            log(f"stopped after {number + 1} of {len(batches)} batches")
            break
    return Text.join(parts)


def _batches(lengths: np.ndarray, chosen: Sequence[int], size: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random groups of a few batches, sorted by length within each, so that little is padding and every early stop
    leaves a fair sample."""
    shuffled, batches = rng.permutation(np.asarray(chosen)), []
    for start in range(0, len(shuffled), 4 * size):
        group = shuffled[start : start + 4 * size]
        group = group[np.argsort(lengths[group], kind="stable")]
        batches += [group[i : i + size] for i in range(0, len(group), size)]
    return batches
