"""Speculation as rank 0 leads it: what the next step guesses, and what became of the guesses of those before."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from engine.acceptance import GuessOutcome
from engine.decode_batch import bucket_sizes
from engine.draft_choice import DraftChoice, StepOutcome
from engine.log import logger
from engine.request import Request
from engine.scheduler import GuessPlan, SchedulerOutput
from engine.stats import SpeculationSnapshot, SpeculationStats
from engine.step_output import ModelRunnerOutput

_NEVER_RIGHT_AFTER = 256  # first guesses; one that knows the language is right more often than once in so many
_SOME_TOKENS = 8  # of an answer: many short ones to one prompt would ask for the same few guesses again and again


class Speculation:
    """`runner` has a draft. Called once a step: `plan` before it, `observe` when a step was read."""

    def __init__(self, runner: Any, adaptive: bool):
        self._runner = runner
        self._sizes = bucket_sizes(runner.max_num_seqs)
        self._choice = DraftChoice(runner.num_guesses, self._bucket_of, runner.verifiable, adaptive)
        self._stats = SpeculationStats(runner.num_guesses)
        self._last: tuple[int, GuessPlan, float] | None = None
        self._num_wrong: int | None = 0  # first guesses so far; None once one was right, or the log has it

    def _bucket_of(self, num_requests: int) -> int:
        return next((size for size in self._sizes if size >= num_requests), self._sizes[-1])

    def plan(self, running: Sequence[Request], arriving: Sequence[Request]) -> GuessPlan:
        """Of the step that these requests may be in."""
        requests = [*running, *arriving]
        if not requests:
            return GuessPlan(0, self._runner.num_guesses)
        last_position = self._runner.drafter.max_positions - self._runner.num_guesses
        beyond = {r.request_id for r in requests if r.num_tokens > last_position}
        num_guesses = max(r.num_guessed if r.num_pending else len(r.guess_ids) for r in requests)
        chosen = self._choice.choose([r.request_id for r in requests], beyond, num_guesses)
        return GuessPlan(chosen.num_verify, chosen.num_propose)

    def observe(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """A step that was read just now; with nothing in it, the engine waits for requests or for a step in flight."""
        items = [item for item in output.scheduled if item.samples]
        is_decode = bool(items) and all(item.samples and item.num_tokens == 1 for item in output.scheduled)
        seconds = self._steady_seconds(len(items), output.plan) if is_decode else None
        if not is_decode and output.scheduled:
            self._last = None
        if not items:
            return
        width = 1 + max(item.num_guesses for item in items)
        outcomes = [
            GuessOutcome(
                item.request.request_id,
                verified=item.num_guesses,
                accepted=min(len(token_ids) - 1, item.num_guesses),
                compared=min(item.num_known, item.num_guesses + (item.num_rows == width)),
                matched=matched,
            )
            for item, token_ids, matched in zip(items, result.token_ids, result.matched, strict=True)
        ]
        self._watch([o for i, o in zip(items, outcomes, strict=True) if i.request.num_output_tokens > _SOME_TOKENS])
        self._choice.observe(StepOutcome(len(items), *output.plan, seconds, outcomes))
        self._stats.observe(len(items), *output.plan, outcomes)
        for item in items:
            if item.request.finished:
                self._choice.forget(item.request.request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """They were ended from outside, by an abort or a stop string."""
        for request_id in request_ids:
            self._choice.forget(request_id)

    def _watch(self, outcomes: Sequence[GuessOutcome]) -> None:
        """Says once that a draft is never right: it answers as if all were well, and is of no use."""
        if self._num_wrong is None:
            return
        compared = [outcome.matched for outcome in outcomes if outcome.compared]
        self._num_wrong = None if any(compared) else self._num_wrong + len(compared)
        if self._num_wrong is not None and self._num_wrong >= _NEVER_RIGHT_AFTER:
            logger.warning(
                "the draft's first guess was wrong %d times and never right: it may not be one of this model, or its "
                "layer ids or weights may not be what its config says; see docs/drafts.md, or start without a draft.",
                self._num_wrong,
            )
            self._num_wrong = None

    def _steady_seconds(self, num_requests: int, plan: GuessPlan) -> float | None:
        """Since the step read before, where that was one of the same kind."""
        now = time.monotonic()
        last, self._last = self._last, (num_requests, plan, now)
        return now - last[2] if last is not None and last[:2] == (num_requests, plan) else None

    def pause(self) -> None:
        """Nothing runs: the time until the next step is not its own."""
        self._last = None

    def snapshot(self) -> SpeculationSnapshot:
        return self._stats.snapshot(self._choice.shown(), self._choice.costs.table())
