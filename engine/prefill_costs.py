"""What a step costs that prefills beside requests that decode, learned from the steps themselves.

    seconds = fixed part + F(rows) + a * pairs + b * expanded tokens + c * cached tokens read as they are
              + d where a chunk expands at all

F is piecewise linear and never falls: a sparse mixture of experts reads nearly all experts for some hundred rows, so
that its cost rises steeply at first, hardly then, and with the products once those take longer than the weights.
`pairs` is the attention of the prompt tokens, about tokens x context; a chunk of more than a few tokens also expands
keys and values of its whole context, however long it is itself, in kernels of its own, which the host may launch more
slowly than the device runs them. No coefficient is below zero.

Steps that are sized to take equally long tell nothing of the coefficients. So the last few steps of each size and
context are kept, the small ones of the start with them, and all are fitted together, errors relative to the time. How
the last few steps differ from the fit scales it: clocks and neighbours slow all steps alike.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_FLATTER = (16, 64, 256, 1024)  # rows where F may get flatter, and below where steeper
_STEEPER = (64, 128, 256, 512, 1024, 2048)
_TYPICAL = (1.0, 1024.0, *map(float, _FLATTER), *map(float, _STEEPER), 1e6, 1e5, 1.0, 1e5)  # features, in their order
_SHRINKAGE = 1e-3  # of coefficients that nothing needs, where the feature has its typical size
_KV_SHRINKAGE = 1e-2  # what hardly varies is the fixed part rather than this
_SWEEPS = 12
_SETTLED = 32  # steps, after which not each one is worth a new fit
_FIT_EVERY = 8
_SURPRISE = 1.1
_CELL_SIZE = 5  # the last steps of one kind
_NUM_CELLS = 32
_HALF_WEIGHT = 256  # steps after which a cell weighs half
_NUM_RECENT = 5  # steps
_MIN_RECENT = 3
_SCALES = (0.1, 10.0)
_HICCUP = 3.0  # times what was predicted; a second one in a row is none
_SHORTEST, _LONGEST = 1e-6, 1e3  # seconds of a step that a clock may give


_ABSORBED_PAIR = 3.4  # products of a pair in the latent space, 576 + 512, over those of expanded heads, 192 + 128


class StepLoad(NamedTuple):
    """tokens: of prompts. rows: of requests that decode, guesses included. pairs: of a prompt token and a token that it
    attends to. kv_tokens: cached tokens that are read as they are, those of requests that decode. expanded: cached
    tokens whose keys and values are computed again. expands: whether a chunk computes keys and values of each head, be
    it of its own tokens alone."""

    tokens: int
    rows: int
    pairs: float
    kv_tokens: int
    expanded: int = 0
    expands: bool = False

    @classmethod
    def of(
        cls, chunks: Iterable[tuple[int, int]], rows: int, kv_tokens: int, most_absorbed: int | None = None
    ) -> StepLoad:
        """chunks: (context, tokens) of each prompt. Those of at most `most_absorbed` tokens expand nothing; None: none
        does."""
        tokens, pairs, expanded, expands = 0, 0.0, 0, False
        for context, count in chunks:
            tokens += count
            is_absorbed = most_absorbed is None or count <= most_absorbed
            pairs += count * (context + count / 2) * (_ABSORBED_PAIR if is_absorbed and most_absorbed else 1.0)
            if is_absorbed:
                kv_tokens += context
            else:
                expanded, expands = expanded + context, True
        return cls(tokens, rows, pairs, kv_tokens, expanded, expands)

    @property
    def kind(self) -> tuple[int, ...]:
        """The same for loads that differ by less than a factor of two or so."""
        context = int(self.pairs / max(self.tokens, 1)) >> 11
        return (
            self.tokens.bit_length(),
            context.bit_length(),
            self.rows.bit_length(),
            (self.kv_tokens >> 14).bit_length(),
            self.expands,
        )


class _Sample(NamedTuple):
    load: StepLoad
    features: tuple[float, ...]
    seconds: float
    number: int


def _features(load: StepLoad) -> tuple[float, ...]:
    rows = load.tokens + load.rows
    bends = [float(min(rows, k)) for k in _FLATTER] + [float(max(rows - k, 0)) for k in _STEEPER]
    return (
        1.0,
        float(rows),
        *bends,
        float(load.pairs),
        float(load.expanded),
        float(load.expands),
        float(load.kv_tokens),
    )


class PrefillCosts:
    """Costs of one engine's steps, in seconds."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, ...], deque[_Sample]] = {}  # the last one used last
        self._recent: deque[_Sample] = deque(maxlen=_NUM_RECENT)
        self._weights: list[float] = [0.0] * len(_TYPICAL)
        self._scale = 1.0
        self._count = 0
        self._after_hiccup = False
        self.least_tokens, self.most_tokens, self.most_pairs = 0, 0, 0.0

    @property
    def is_measured(self) -> bool:
        return bool(self._cells)

    def seed(self, samples: Iterable[tuple[StepLoad, float]]) -> None:
        """Steps measured in advance, which need not be what they cost among others."""
        for load, seconds in samples:
            self._keep(load, seconds)
        if self._cells:
            self._fit(_SWEEPS * 16)

    def add(self, load: StepLoad, seconds: float) -> None:
        """A step that prefilled. What no step takes (zero, hours, not a number) is dropped, and one hiccup alone."""
        if not _SHORTEST < seconds < _LONGEST:
            return
        is_hiccup = self.is_measured and seconds > _HICCUP * self.predict(load)
        is_new, self._after_hiccup = is_hiccup and not self._after_hiccup, is_hiccup
        if is_new:
            return
        self._recent.append(self._keep(load, seconds))
        is_expected = 1 / _SURPRISE < seconds / self.predict(load) < _SURPRISE
        if self._count <= _SETTLED or self._count % _FIT_EVERY == 0 or not is_expected:
            self._fit(_SWEEPS)
        ratios = sorted(sample.seconds / self._fitted(sample.features) for sample in self._recent)
        low, high = _SCALES
        self._scale = 1.0 if len(ratios) < _MIN_RECENT else min(max(ratios[len(ratios) // 2], low), high)

    def predict(self, load: StepLoad) -> float:
        """Seconds; never less for more. 0 before anything was measured."""
        return self._scale * self._fitted(_features(load)) if self._cells else 0.0

    def _fitted(self, features: tuple[float, ...]) -> float:
        return max(_dot(self._weights, features), _SHORTEST)

    def _keep(self, load: StepLoad, seconds: float) -> _Sample:
        self._count += 1
        sample = _Sample(load, _features(load), seconds, self._count)
        cell = self._cells.pop(load.kind, None) or deque(maxlen=_CELL_SIZE)
        cell.append(sample)
        self._cells[load.kind] = cell
        if len(self._cells) > _NUM_CELLS:
            del self._cells[next(iter(self._cells))]
        loads = [sample.load for cell in self._cells.values() for sample in cell]
        self.least_tokens, self.most_tokens = min(load.tokens for load in loads), max(load.tokens for load in loads)
        self.most_pairs = max(load.pairs for load in loads)
        return sample

    def _fit(self, sweeps: int) -> None:
        """Least squares of the relative errors without coefficients below zero, by descent along each in turn."""
        rows = [self._row(cell) for cell in self._cells.values()]
        size = len(self._weights)
        columns = list(zip(*(row for row, _ in rows), strict=True))
        shares = [share for _, share in rows]
        weighted = [[value * share for value, share in zip(column, shares, strict=True)] for column in columns]
        products = [[_dot(one, other) for other in columns] for one in weighted]
        targets = [sum(column) for column in weighted]
        inverse = max(columns[0])
        for j in range(size):
            products[j][j] += (_KV_SHRINKAGE if j == size - 1 else _SHRINKAGE) * (_TYPICAL[j] * inverse) ** 2
        weights = self._weights
        for _ in range(sweeps):
            for j, row in enumerate(products):
                if row[j] > 0:
                    weights[j] = max(weights[j] + (targets[j] - _dot(row, weights)) / row[j], 0.0)

    def _row(self, cell: deque[_Sample]) -> tuple[list[float], float]:
        """Features over seconds of the cell's median step, which a hiccup is not, and the weight of the cell."""
        ordered = sorted(cell, key=lambda sample: sample.seconds / self._fitted(sample.features))
        sample = ordered[(len(ordered) - 1) // 2]
        age = self._count - cell[-1].number
        return [value / sample.seconds for value in sample.features], 1 / (1 + age / _HALF_WEIGHT)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(operator.mul, one, other))
