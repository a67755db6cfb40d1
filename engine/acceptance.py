"""How often a draft's guesses are right: for each request, by position in the chain of guesses, kept current.

A rate is conditional: of guess i given that those before it were accepted. All are moving means: a new request starts
with what is usual in the engine, as if that were a few observations of its own, and what it shows counts from then on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

FIRST_RATE = 0.6  # of an unknown draft: published EAGLE-3 heads lie between 0.5 and 0.8
_FIRST_WEIGHT = 4.0
_USUAL_WEIGHT = 3.0  # of what is usual, in a new request's rate
_MEMORY = 32.0  # observations that a request's rate is a mean of
_USUAL_MEMORY = 128.0
_RARE_WEIGHT = 1.0  # of all that was seen before, where observations are far apart
_DOUBT = 0.25
_DOUBT_WEIGHT = 4.0


class GuessOutcome(NamedTuple):
    """What became of one request's guesses in a step.

    verified: guesses it really had among those verified. accepted: of them. compared: guesses that a token was drawn
    for, which may be one more than verified. matched: leading guesses of `compared` that equal the tokens drawn.
    """

    request_id: str
    verified: int
    accepted: int
    compared: int
    matched: int


class _Rates:
    __slots__ = ("rates", "weights")

    def __init__(self, rates: list[float], weights: list[float]):
        self.rates, self.weights = rates, weights


class AcceptanceRates:
    """Rates at `num_positions` positions, for every request seen and for what is usual."""

    def __init__(self, num_positions: int):
        self.num_positions = num_positions
        self._usual = _Rates([FIRST_RATE] * num_positions, [_FIRST_WEIGHT] * num_positions)
        self._requests: dict[str, _Rates] = {}

    @property
    def usual(self) -> tuple[float, ...]:
        return tuple(self._usual.rates)

    def observe(self, outcomes: Iterable[GuessOutcome], rarely: bool = False) -> None:
        """`rarely`: the observation before was many steps ago, so this one counts about as much as all before."""
        num_positions = self.num_positions
        stopped, failed = [0] * (num_positions + 1), [0] * (num_positions + 1)
        find = self._requests.get
        for request_id, _, _, compared, matched in outcomes:
            if not compared:
                continue
            of_request = find(request_id) or self._new(request_id)
            rates, weights = of_request.rates, of_request.weights
            if rarely:
                weights[0] = min(weights[0], _RARE_WEIGHT)
            if compared > num_positions:
                compared = num_positions
            if matched < compared:
                failed[matched] += 1
                weight = weights[matched] + 1.0
                rates[matched] -= rates[matched] / weight
                if weight <= _MEMORY:
                    weights[matched] = weight
            else:
                matched = compared
            stopped[matched] += 1
            for position in range(matched):
                weight = weights[position] + 1.0
                rates[position] += (1.0 - rates[position]) / weight
                if weight <= _MEMORY:
                    weights[position] = weight
        self._observe_usual(stopped, failed, rarely)

    def _observe_usual(self, stopped: list[int], failed: list[int], rarely: bool) -> None:
        """stopped[m]: requests with m matches; failed[m]: those of them whose next guess was wrong."""
        rates, weights = self._usual.rates, self._usual.weights
        hits = sum(stopped)
        for position in range(self.num_positions):
            hits -= stopped[position]
            count = hits + failed[position]
            if not count:
                break
            weight = min(weights[position], _RARE_WEIGHT) if rarely else weights[position]
            rates[position] += (hits - count * rates[position]) / (weight + count)
            weights[position] = min(weight + count, _USUAL_MEMORY)

    def expected_tokens(
        self, request_ids: Sequence[str], beyond: Collection[str] = (), most: int | None = None
    ) -> list[float]:
        """Tokens that a step of these requests commits on average, at k = 0..most guesses each.

        Requests in `beyond` get one token whatever is guessed.
        """
        most = self.num_positions if most is None else most
        positions = range(most)
        sums = [0.0] * most
        for request_id in request_ids:
            if request_id in beyond:
                continue
            rates = (self._requests.get(request_id) or self._new(request_id)).rates
            chance = 1.0
            for position in positions:
                chance *= rates[position]
                sums[position] += chance
        tokens = [float(len(request_ids))]
        for value in sums:
            tokens.append(tokens[-1] + value)
        return tokens

    def doubt(self, position: int) -> None:
        """Positions from this one on were not looked at for long: they move towards the position before them, and what
        they showed once counts little. Otherwise a position that failed would never be tried again."""
        for of_request in (self._usual, *self._requests.values()):
            rates, weights = of_request.rates, of_request.weights
            for i in range(max(position, 1), self.num_positions):
                rates[i] += _DOUBT * max(rates[i - 1] - rates[i], 0.0)
                weights[i] = min(weights[i], _DOUBT_WEIGHT)

    def knows(self, request_id: str) -> bool:
        return request_id in self._requests

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forgets all other requests."""
        kept = set(request_ids)
        self._requests = {key: value for key, value in self._requests.items() if key in kept}

    def __len__(self) -> int:
        return len(self._requests)

    def _new(self, request_id: str) -> _Rates:
        weights = [min(weight, _USUAL_WEIGHT) for weight in self._usual.weights]
        rates = self._requests[request_id] = _Rates(list(self._usual.rates), weights)
        return rates
