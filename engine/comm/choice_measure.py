"""Builds and measures the dispatchers to choose from; what fails on one rank is dropped by all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

from engine.comm import choice_rule
from engine.comm import dispatcher as dispatchers
from engine.comm.choice_cache import Measured
from engine.comm.collectives import RankError, together
from engine.comm.dispatcher import DispatchLimits, TokenDispatcher
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes
from engine.log import logger

Measure = Callable[[TokenDispatcher, int], RoundTimes]
"""What the rounds of so many rows take; every rank calls it."""


def build_all(names: list[str], parallel: ParallelState, limits: DispatchLimits) -> dict[str, TokenDispatcher]:
    """Those that every rank could build. Raises RankError if the baseline is not among them."""
    built: dict[str, TokenDispatcher] = {}
    for name in names:
        try:
            built[name] = _build(name, parallel, limits)
        except RankError as error:
            if name == choice_rule.BASELINE:
                raise
            logger.warning("moe_comm=auto goes without %s: %s", name, error)
    return built


def _build(name: str, parallel: ParallelState, limits: DispatchLimits) -> TokenDispatcher:
    made: list[TokenDispatcher] = []
    together(lambda: made.append(dispatchers.build(name, parallel, limits)), parallel)
    return made[0]


def measure_all(
    built: dict[str, TokenDispatcher], sizes: list[int], parallel: ParallelState, measure: Measure
) -> Measured:
    """What each dispatcher takes at each size, as the slowest rank has it; one that fails on a rank is left out."""
    measured: Measured = {}
    for name, one in built.items():
        try:
            measured[name] = {size: _slowest(measure, one, size, parallel) for size in sizes}
        except RankError as error:
            logger.warning("moe_comm=auto goes without %s, which could not be measured: %s", name, error)
    return measured


def _slowest(measure: Measure, dispatcher: TokenDispatcher, size: int, parallel: ParallelState) -> RoundTimes:
    of_ranks = together(lambda: [*astuple(measure(dispatcher, size))], parallel)
    return RoundTimes(*(max(verb) for verb in zip(*of_ranks, strict=True)))
