"""Which dispatcher each size of step uses, given what each takes there. Pure: the same times give the same choice."""

from __future__ import annotations

from collections.abc import Mapping

BASELINE = "allreduce"
INVARIANT_ROWS = 64
"""Steps of up to so many rows give a row the same bits whatever its company, so their sums are of one family."""

LOSS = 1.05
"""More than this many times the baseline's time is slower beyond noise."""

EQUAL = 1.02
"""Up to this many times another time is the same time."""

Times = Mapping[str, Mapping[int, float]]
"""Dispatcher -> rows -> seconds; in the table's order, and every dispatcher at the same sizes."""


def choose(times: Times, families: Mapping[str, str]) -> dict[int, str]:
    """Rows -> dispatcher, for every measured size.

    Sizes up to INVARIANT_ROWS share one family: of those whose best dispatcher loses against the baseline at none of
    these sizes, the one with the lowest total; of all, where each loses somewhere. Larger sizes take the fastest of
    any family. Where times are equal, the size before decides, then the order of the table within the family.
    """
    sizes = sorted(next(iter(times.values())))
    inside = [size for size in sizes if size <= INVARIANT_ROWS]
    family = _family(times, families, inside)
    members = [name for name in times if families[name] == family]
    chosen: dict[int, str] = {}
    before = None
    for size in sizes:
        before = chosen[size] = _at(size, members if size in inside else list(times), times, families, before)
    return chosen


def slower_than_baseline(chosen: Mapping[int, str], times: Times) -> list[int]:
    """The sizes at which the choice takes longer than the baseline and the two are not equal."""
    if BASELINE not in times:
        return []
    return [size for size, name in chosen.items() if times[name][size] > EQUAL * times[BASELINE][size]]


def _family(times: Times, families: Mapping[str, str], sizes: list[int]) -> str:
    best = {
        family: [min(times[name][size] for name in times if families[name] == family) for size in sizes]
        for family in dict.fromkeys(families[name] for name in times)
    }
    limits = [_limit(times, size) for size in sizes]
    without_loss = [f for f, each in best.items() if all(t <= most for t, most in zip(each, limits, strict=True))]
    return min(without_loss or best, key=lambda family: sum(best[family]))


def _limit(times: Times, size: int) -> float:
    return LOSS * times[BASELINE][size] if BASELINE in times else float("inf")


def _at(size: int, names: list[str], times: Times, families: Mapping[str, str], before: str | None) -> str:
    fastest = min(names, key=lambda name: times[name][size])
    least = times[fastest][size]
    most = max(least, min(EQUAL * least, _limit(times, size)))
    equal = [name for name in names if times[name][size] <= most]
    if before in equal:
        return before
    return next(name for name in equal if families[name] == families[fastest])
