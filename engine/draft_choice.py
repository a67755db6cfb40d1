"""How many guesses the next decode step verifies: whatever gives most tokens a second, none included.

Rank 0 decides, since times are its own, and tells the other ranks. Tokens come from the acceptance seen so far, seconds
from the steps measured so far; neither is taken from a table made elsewhere. While plain steps win, the draft is asked
now and then: one plain step makes guesses, and the next one's tokens show for free whether the first was right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.acceptance import AcceptanceRates, GuessOutcome
from engine.stats import DraftChoiceStats
from engine.step_costs import MIN_SAMPLES, StepCosts

_START_GAIN = 1.03  # a choice is left for another only if that is better by this factor
_CHANGE_GAIN = 1.02
_FIRST_PROBE, _LAST_PROBE = 16, 128  # plain steps from one probe to the next
_PROBE_AGAIN = 4  # after one that went much better than usual
_MOST_REPEATS = 4
_SURPRISE = 0.2
_LASTING = 16  # verify steps after which speculation counts as having been worth a try
_MEASURED_STEPS = MIN_SAMPLES + 3  # at most; the first of a run is not timed, one is in flight
_DOUBT_EVERY = 64  # steps
_MAX_STRANGERS = 256

CHOICE_CODES = ("gain", "plain", "probe", "draft", "measure", "beyond", "limit", "fixed")


class Plan(NamedTuple):
    """Verify num_verify guesses a request, then make num_propose: (0, 0), (0, K) or (k, k).

    code: why, one of CHOICE_CODES. tokens: expected a request at num_guesses; cost: of such a step, in plain steps;
    num_guesses: what the code speaks of, which is the best but zero where plain steps win.
    """

    num_verify: int
    num_propose: int
    code: str
    num_guesses: int = 0
    tokens: float = 1.0
    cost: float = 1.0

    @property
    def reason(self) -> str:
        """For people."""
        k = self.num_guesses
        if self.code == "gain":
            return f"k={k}: {self.tokens:.2f} tokens in {self.cost:.2f} plain steps"
        if self.code == "plain":
            return f"plain: k={k} would give {self.tokens / self.cost:.2f}x"
        return {
            "probe": f"probing: k={k} would give {self.tokens / self.cost:.2f}x",
            "draft": f"making guesses for k={k}",
            "measure": f"measuring k={k}",
            "beyond": "plain: every request is past the draft's positions",
            "limit": "plain: no step that verifies is made for so many requests",
            "fixed": f"k={k}: fixed",
        }[self.code]


class StepOutcome(NamedTuple):
    """A decode step that was read. seconds: its time where it and the step before were alike and back to back, None
    otherwise. requests: one outcome for each that was live."""

    num_requests: int
    num_verify: int
    num_propose: int
    seconds: float | None
    requests: Sequence[GuessOutcome]


@dataclass
class _Measuring:
    """One number of guesses is held until it has been timed. done_at: steady times wanted in all."""

    bucket: int
    num_guesses: int
    done_at: int
    steps_left: int = _MEASURED_STEPS


class DraftChoice:
    """Chooses a `Plan` for each step; at most `num_draft_tokens` guesses.

    bucket_of: the bucket that so many requests are padded to. available: the numbers of guesses that a bucket has a
    step for (all of 0..num_draft_tokens if not given; zero always is). Without `adaptive` as many as there are.

    `choose` plans a step, `observe` is told of each in the same order; steps may be planned before those ahead of them
    are read.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        bucket_of: Callable[[int], int] = lambda num_requests: num_requests,
        available: Callable[[int], Collection[int]] | None = None,
        adaptive: bool = True,
    ):
        self.num_draft_tokens, self.adaptive = num_draft_tokens, adaptive
        self.rates, self.costs = AcceptanceRates(num_draft_tokens), StepCosts(num_draft_tokens)
        self.plans: dict[int, Plan] = {}
        self._bucket_of, self._available = bucket_of, available
        self._options: dict[int, tuple[int, ...]] = {}
        self._beyond: Collection[str] = frozenset()
        self._current = self._num_proposed = self._num_steps = 0
        self._lasted = self._since_probe = 0
        self._probe_after, self._repeats, self._again = _FIRST_PROBE, _MOST_REPEATS, False
        self._measuring: _Measuring | None = None

    def choose(
        self, request_ids: Sequence[str], beyond: Collection[str] = frozenset(), num_guesses: int | None = None
    ) -> Plan:
        """The plan of the next step of these requests.

        beyond: those past the draft's positions. num_guesses: how many guesses the step before left, which is what the
        last plan said unless given.
        """
        bucket = self._bucket_of(len(request_ids))
        has_guesses = (self._num_proposed if num_guesses is None else num_guesses) > 0
        self._beyond = beyond
        self._num_steps += 1
        if self.adaptive:
            plan = self._adapt(bucket, request_ids, has_guesses)
        elif self._all_beyond(request_ids):
            plan = Plan(0, 0, "beyond")
        else:
            most = self._options_of(bucket)[-1]
            plan = self._plan(most, has_guesses, "fixed" if most else "limit", most)
        self._num_proposed = plan.num_propose
        self.plans[bucket] = plan
        return plan

    def observe(self, step: StepOutcome) -> None:
        """Takes what a step showed."""
        if step.seconds is not None and (step.num_verify > 0 or step.num_propose == 0):
            self.costs.add(self._bucket_of(step.num_requests), step.num_verify, step.seconds)
        requests = step.requests
        if self._beyond:
            requests = [outcome for outcome in requests if outcome.request_id not in self._beyond]
        if step.num_verify == 0:
            self._read_probe(requests)
        self.rates.observe(requests, rarely=step.num_verify == 0)

    def _read_probe(self, requests: Sequence[GuessOutcome]) -> None:
        """One that went much better than usual is soon repeated, at most as often as regular ones in the long run."""
        compared = [outcome.matched > 0 for outcome in requests if outcome.compared]
        if self._repeats and compared and sum(compared) / len(compared) > self.rates.usual[0] + _SURPRISE:
            self._repeats -= 1
            self._again = True

    def shown(self) -> dict[int, DraftChoiceStats]:
        """The last plan of each bucket."""
        return {
            bucket: DraftChoiceStats(plan.num_verify, plan.code, plan.reason)
            for bucket, plan in sorted(self.plans.items())
        }

    def forget(self, request_id: str) -> None:
        """A request ended; its id may be used again."""
        self.rates.forget(request_id)

    def _all_beyond(self, request_ids: Sequence[str]) -> bool:
        return bool(self._beyond) and all(r in self._beyond for r in request_ids)

    def _options_of(self, bucket: int) -> tuple[int, ...]:
        options = self._options.get(bucket)
        if options is None:
            every = range(self.num_draft_tokens + 1)
            allowed = set(every if self._available is None else self._available(bucket)) | {0}
            options = self._options[bucket] = tuple(k for k in every if k in allowed)
        return options

    def _plan(
        self, k: int, has_guesses: bool, code: str, num_guesses: int, tokens: float = 1.0, cost: float = 1.0
    ) -> Plan:
        """Guesses not there yet are made by a plain step first."""
        if k and not has_guesses:
            return Plan(0, self.num_draft_tokens, "draft", k, tokens, cost)
        return Plan(k, k, code, num_guesses, tokens, cost)

    def _adapt(self, bucket: int, request_ids: Sequence[str], has_guesses: bool) -> Plan:
        self._look_after(request_ids)
        self.costs.tick(bucket)
        options = self._options_of(bucket)
        if len(options) == 1 or self._all_beyond(request_ids):
            self._turn(0)
            return Plan(0, 0, "limit" if len(options) == 1 else "beyond")
        tokens = self.rates.expected_tokens(request_ids, self._beyond, options[-1])
        curve = self.costs.curve(bucket)
        speeds = {k: tokens[k] / curve.seconds[k] for k in options}
        best = self._best(speeds)
        hopes = {k: tokens[k] / curve.least[k] for k in options if curve.is_open[k] and k != best}
        measured = self._to_measure(bucket, hopes, speeds[best])
        if measured is None:
            self._turn(best)
        k = best if measured is None else measured
        spoken = k or max(options[1:], key=speeds.__getitem__)
        facts = spoken, tokens[spoken] / len(request_ids), curve.seconds[spoken] / curve.seconds[0]
        if measured is not None:
            return self._plan(k, has_guesses, "measure", k)
        if not k and self._is_time_to_probe():
            return Plan(0, self.num_draft_tokens, "probe", *facts)
        return self._plan(k, has_guesses, "gain" if k else "plain", *facts)

    def _look_after(self, request_ids: Sequence[str]) -> None:
        """What new requests and the time that passed change."""
        if self._current == 0 and not all(map(self.rates.knows, request_ids)):
            self._probe_after = max(2 * _FIRST_PROBE, self._probe_after // 2)
        if len(self.rates) > len(request_ids) + _MAX_STRANGERS:
            self.rates.keep(request_ids)
        if self._num_steps % _DOUBT_EVERY == 0 and self._current:
            self.rates.doubt(self._current)

    def _best(self, speeds: dict[int, float]) -> int:
        """The fastest number of guesses; the current one unless that is left for a gain worth it."""
        best = max(speeds, key=speeds.__getitem__)
        current = speeds.get(self._current)
        if best in (0, self._current) or current is None:
            return best
        gain = _CHANGE_GAIN if self._current else _START_GAIN
        return best if speeds[best] > current * gain else self._current

    def _turn(self, k: int) -> None:
        """The choice is k, for now; counts how long speculation lasts."""
        if k:
            self._lasted += 1
        elif self._current:
            lasting = self._lasted >= _LASTING
            self._probe_after = _FIRST_PROBE if lasting else min(2 * self._probe_after, _LAST_PROBE)
            self._lasted = self._since_probe = 0
        self._current = k

    def _is_time_to_probe(self) -> bool:
        self._since_probe += 1
        if self._since_probe < (_PROBE_AGAIN if self._again else self._probe_after):
            return False
        self._since_probe = 0
        if not self._again:
            self._probe_after = min(2 * self._probe_after, _LAST_PROBE)
            self._repeats = min(self._repeats + 1, _MOST_REPEATS)
        self._again = False
        return True

    def _to_measure(self, bucket: int, hopes: dict[int, float], speed: float) -> int | None:
        """A number of guesses that may be faster than the best known, as far as one can tell without a measurement."""
        running = self._measuring
        if running is not None:
            k = running.num_guesses
            if self.costs.count(bucket, k) >= running.done_at and running.bucket == bucket:
                self.costs.end_measuring(bucket, k)
            elif running.bucket == bucket and running.steps_left > 0 and hopes.get(k, speed) >= speed:
                running.steps_left -= 1
                return k
            self._measuring = None
        worth = [k for k, hope in hopes.items() if hope > speed * _CHANGE_GAIN and self.costs.may_measure(bucket, k)]
        if not worth:
            return None
        k = max(worth, key=hopes.__getitem__)
        self.costs.begin_measuring(bucket, k)
        self._measuring = _Measuring(bucket, k, self.costs.count(bucket, k) + MIN_SAMPLES)
        return k
