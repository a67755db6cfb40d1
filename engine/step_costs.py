"""What a decode step costs, measured while serving: seconds for each bucket of batch sizes and number of guesses.

A cost is the median of the last steady times, so a hiccup does not move it. Costs grow with the context: while one
number of guesses runs, the bucket's others are taken to grow with it, until they are measured again. Costs never
measured come from the nearest bucket's ratios, or from a shape that a sparse mixture of experts has about.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

GUESS_COST = 0.22  # of a plain step, for each guess verified and made; before anything is measured
_LEAST_GUESS_COST = 0.06  # about what making a guess costs alone
_MOST_GUESS_COST = 1.0  # a row more is at most one more plain step
_SHORTEST, _LONGEST = 1e-6, 1e3  # seconds of a step that a clock may give
MIN_SAMPLES = 3  # a hiccup among them does not count
_WINDOW = 15
_RESUMED_AFTER = 64  # steps
_HORIZON = 4096  # steps
_DRIFT = 1.3
_RETRY_AFTER = 256  # steps
_CURVE_AGE = 64  # steps


class CostCurve(NamedTuple):
    """Of one bucket, by number of guesses: seconds (in plain steps if nothing was measured), the least that each may
    be, and whether it wants measuring: never done, or too long ago."""

    seconds: tuple[float, ...]
    least: tuple[float, ...]
    is_open: tuple[bool, ...]


class _Cost:
    """seconds: at the time that the bucket's level was `level`."""

    __slots__ = ("attempts", "count", "is_measured", "level", "next_attempt", "samples", "seconds", "step")

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_WINDOW)
        self.seconds, self.level, self.is_measured = 0.0, 1.0, False
        self.count = self.step = self.attempts = self.next_attempt = 0


class _Bucket:
    """level: how much costs grew since the start. run: samples since the number of guesses last changed."""

    __slots__ = ("costs", "curve", "curve_step", "last", "level", "run", "step")

    def __init__(self, num_costs: int):
        self.costs = [_Cost() for _ in range(num_costs)]
        self.step = self.run = self.curve_step = 0
        self.last = -1
        self.level = 1.0
        self.curve: CostCurve | None = None

    def known(self) -> dict[int, float]:
        return {k: c.seconds * self.level / c.level for k, c in enumerate(self.costs) if c.is_measured}


class StepCosts:
    """Costs at 0..num_guesses guesses."""

    def __init__(self, num_guesses: int):
        self._num_costs = num_guesses + 1
        self._buckets: dict[int, _Bucket] = {}

    def tick(self, bucket: int) -> None:
        """A step of this bucket is planned; ages count such steps."""
        self._bucket(bucket).step += 1

    def add(self, bucket: int, num_guesses: int, seconds: float) -> None:
        """A steady time. What no step takes (zero, negative, hours, not a number) is dropped."""
        if not _SHORTEST < seconds < _LONGEST:
            return
        here = self._bucket(bucket)
        cost = here.costs[num_guesses]
        here.run = here.run + 1 if here.last == num_guesses else 1
        here.last = num_guesses
        if here.run == 1 and here.step - cost.step > _RESUMED_AFTER:
            cost.samples.clear()
            if cost.is_measured:
                cost.samples.append(cost.seconds * here.level / cost.level)
        before = cost.seconds
        cost.samples.append(seconds)
        cost.seconds = sorted(cost.samples)[(len(cost.samples) - 1) // 2]
        if here.run > _WINDOW:  # all samples are of this run: what moves is the context, not the number of guesses
            here.level *= cost.seconds / before
        cost.level, cost.step = here.level, here.step
        cost.count += 1
        was_measured = cost.is_measured
        cost.is_measured = was_measured or len(cost.samples) >= MIN_SAMPLES
        if cost.is_measured and (not was_measured or abs(cost.seconds / before - 1) > 0.002 or here.run <= 2):
            here.curve = None

    def count(self, bucket: int, num_guesses: int) -> int:
        """Steady times added so far."""
        return self._bucket(bucket).costs[num_guesses].count

    def may_measure(self, bucket: int, num_guesses: int) -> bool:
        """Whether the last attempt is long enough ago; each that brought nothing doubles the wait."""
        here = self._bucket(bucket)
        return here.step >= here.costs[num_guesses].next_attempt

    def begin_measuring(self, bucket: int, num_guesses: int) -> None:
        here = self._bucket(bucket)
        cost = here.costs[num_guesses]
        cost.next_attempt = here.step + (_RETRY_AFTER << min(cost.attempts, 6))
        cost.attempts += 1

    def end_measuring(self, bucket: int, num_guesses: int) -> None:
        """It brought what was wanted."""
        self._bucket(bucket).costs[num_guesses].attempts = 0

    def curve(self, bucket: int) -> CostCurve:
        here = self._bucket(bucket)
        if here.curve is None or here.step - here.curve_step >= _CURVE_AGE:
            here.curve = self._make_curve(here, self._shape(bucket))
            here.curve_step = here.step
        return here.curve

    def table(self) -> dict[int, dict[int, float]]:
        """Bucket -> number of guesses -> seconds, of what was measured."""
        return {bucket: known for bucket, here in sorted(self._buckets.items()) if (known := here.known())}

    def _bucket(self, bucket: int) -> _Bucket:
        found = self._buckets.get(bucket)
        if found is None:
            found = self._buckets[bucket] = _Bucket(self._num_costs)
        return found

    def _shape(self, bucket: int) -> tuple[float, ...]:
        """Costs in plain steps as far as other buckets tell."""
        first = tuple(1 + GUESS_COST * k for k in range(self._num_costs))
        measured = [
            (abs(math.log(other / bucket)), other)
            for other, here in self._buckets.items()
            if other != bucket and any(c.is_measured for c in here.costs[1:]) and here.costs[0].is_measured
        ]
        if not measured:
            return first
        seconds = self._make_curve(self._buckets[min(measured)[1]], first).seconds
        return tuple(value / seconds[0] for value in seconds)

    def _make_curve(self, here: _Bucket, shape: tuple[float, ...]) -> CostCurve:
        known = here.known()
        if not known:
            return CostCurve(shape, shape, (True,) * self._num_costs)
        seconds, least, is_open = [], [], []
        for k, cost in enumerate(here.costs):
            value = known.get(k)
            if value is None:
                nearest = min(known, key=lambda other: abs(other - k))
                lowest = _least_cost(known, k)
                value = max(known[nearest] * shape[k] / shape[nearest], lowest)
                value = min([value, *(seconds_of for other, seconds_of in known.items() if other > k)])
                is_open.append(True)
            else:
                grown = here.level / cost.level
                is_open.append(here.step - cost.step > _HORIZON or not 1 / _DRIFT < grown < _DRIFT)
                lowest = min(value / _DRIFT, cost.seconds) if is_open[-1] else value
            seconds.append(value)
            least.append(min(lowest, value))
        return CostCurve(tuple(seconds), tuple(least), tuple(is_open))


def _least_cost(known: dict[int, float], k: int) -> float:
    """Of a number of guesses not measured. Costs grow with it, and less and less (more experts are shared by rows), so
    they lie above the line between two that are known."""
    below = max((other for other in known if other < k), default=None)
    above = min((other for other in known if other > k), default=None)
    if above is None:
        return known[below] * (1 + _LEAST_GUESS_COST * (k - below) / (1 + GUESS_COST * below))
    if below is None:
        below, low = 0, known[above] / (1 + _MOST_GUESS_COST * above)
    else:
        low = known[below]
    return low + (known[above] - low) * (k - below) / (above - below)
