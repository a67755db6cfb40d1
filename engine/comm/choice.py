"""Which dispatcher a step of so many rows uses: the one that was fastest when all ranks tried them."""

from __future__ import annotations

import bisect
import time
from typing import Any

from engine.comm import choice_rule
from engine.comm import dispatcher as dispatchers
from engine.comm.choice_cache import ChoiceCache, Measured, as_json, fingerprint, from_json
from engine.comm.choice_measure import Measure, build_all, measure_all
from engine.comm.collectives import RankError, gather_json
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, TokenDispatcher
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import time_dispatcher, try_once
from engine.log import logger


def candidates(name: str, parallel: ParallelState, limits: DispatchLimits) -> list[str]:
    """The dispatchers that `moe_comm=name` may use on this rank.

    "auto" takes those whose tokens are replicated: where they are sharded the shared expert is held whole, which is
    another share of the weights and many times the reading for few rows, so those are used by name alone. `reference`
    is the oracle and competes with none. Ranks on a CPU exchange through gloo, whose times say nothing of a GPU's
    links and where no dispatcher has kernels of its own.
    """
    if name != "auto":
        return [name]
    if parallel.is_alone:
        return ["reference"]
    if parallel.device.type != "cuda":
        return [choice_rule.BASELINE]
    return [one for one in DISPATCHERS if one != "reference" and _replicates(one, parallel, limits)]


def shards_tokens(name: str) -> bool:
    """Whether the dispatchers of `moe_comm=name` shard tokens, which the layers' weights depend on."""
    return name != "auto" and dispatchers.dispatcher_class(name).shards_tokens


def _replicates(name: str, parallel: ParallelState, limits: DispatchLimits) -> bool:
    cls = dispatchers.dispatcher_class(name)
    reason = None if cls.shards_tokens else cls.obstacle(parallel, limits)
    if reason is not None:
        logger.info("moe_comm=auto goes without %s, which %s", name, reason)
    return not cls.shards_tokens and reason is None


def measured_sizes(buckets: list[int], max_tokens: int) -> list[int]:
    """The sizes of step to measure: the buckets of decode steps, the end of the invariant range, its doubles, and the
    largest step."""
    doubles = []
    size = choice_rule.INVARIANT_ROWS
    while size < max_tokens:
        doubles.append(size)
        size *= 2
    return sorted({*(b for b in buckets if b < max_tokens), *doubles, max_tokens})


class DispatcherChoice:
    """The dispatchers of an engine, built and measured collectively; the same choice on every rank.

    sizes: rows of the steps to measure, ascending. cache: a directory, "off", or None for the user's. measure: how a
    dispatcher is timed, with `time_dispatcher` if left out. Raises ValueError with the reason where the dispatcher
    named cannot run. `local_experts` are the same for all of them.
    """

    def __init__(
        self,
        name: str,
        parallel: ParallelState,
        limits: DispatchLimits,
        sizes: list[int] | None = None,
        cache: str | None = None,
        measure: Measure | None = None,
    ):
        self._sizes = sizes or [limits.max_tokens]
        self._measured: Measured = {}
        names = _agreed(candidates(name, parallel, limits), parallel)
        if len(names) == 1:
            self._built = {names[0]: _tried(names[0], parallel, limits)}
        else:
            self._built = build_all(names, parallel, limits)
        self._chosen = dict.fromkeys(self._sizes, next(iter(self._built)))
        if len(self._built) > 1:
            measure = measure or (lambda one, rows: time_dispatcher(one, rows, limits, parallel))
            self._choose(ChoiceCache(cache), limits, parallel, measure)
        elif name == "auto" and parallel.rank == 0 and not parallel.is_alone:
            logger.info("all steps use %s, unmeasured: %s", self.name, _why_alone(parallel))

    def _choose(self, cache: ChoiceCache, limits: DispatchLimits, parallel: ParallelState, measure: Measure) -> None:
        """What rank 0 kept or measured, and so its choice, become every rank's: the rule is the same for all."""
        started = time.monotonic()
        names = list(self._built)
        key = fingerprint(names, self._sizes, limits, parallel)
        kept = self._from_rank_0((cache.load(key) if parallel.rank == 0 else None) or {}, parallel)
        self._measured = kept or self._from_rank_0(measure_all(self._built, self._sizes, parallel, measure), parallel)
        families = {name: one.family for name, one in self._built.items()}
        self._chosen = dict.fromkeys(self._sizes, choice_rule.BASELINE)
        if self._measured:
            self._chosen = choice_rule.choose(self._layers(), families)
        if parallel.rank == 0:
            self._log(f"kept in {cache.path(key)}" if kept else f"in {time.monotonic() - started:.1f} s")
            if not kept and len(self._measured) == len(names):  # a failure may be a passing one
                cache.store(key, self._measured)
        self._drop_others(set(self._chosen.values()))

    def _from_rank_0(self, measured: Measured, parallel: ParallelState) -> Measured:
        told = gather_json(as_json(measured) if parallel.rank == 0 else {}, parallel)[0]
        return from_json(told, list(self._built), self._sizes)

    def _layers(self) -> choice_rule.Times:
        return {name: {size: one.layer for size, one in row.items()} for name, row in self._measured.items()}

    def _log(self, how: str) -> None:
        if not self._measured:
            logger.warning("no dispatcher could be measured; all steps use %s", choice_rule.BASELINE)
            return
        logger.info("dispatchers measured (%s), microseconds a layer, * chosen:\n%s", how, self.table())
        slower = choice_rule.slower_than_baseline(self._chosen, self._layers())
        if slower:
            logger.warning("the dispatcher chosen is slower than %s at %s rows", choice_rule.BASELINE, slower)

    def _drop_others(self, used: set[str]) -> None:
        for name in [n for n in self._built if n not in used]:
            self._built.pop(name).close()

    @property
    def name(self) -> str:
        return ", ".join(self._built)

    @property
    def is_capturable(self) -> bool:
        return all(one.is_capturable for one in self._built.values())

    @property
    def local_experts(self) -> range:
        return next(iter(self._built.values())).local_experts

    def for_rows(self, num_rows: int) -> TokenDispatcher:
        """The dispatcher of a step of `num_rows` rows, padding included; the same on every rank.

        That of the smallest size measured that is as large, or of the largest."""
        place = min(bisect.bisect_left(self._sizes, num_rows), len(self._sizes) - 1)
        return self._built[self._chosen[self._sizes[place]]]

    def report(self) -> dict[str, Any]:
        """What was measured, and what was chosen: {"microseconds": {rows: {dispatcher: of a layer's rounds}},
        "chosen": {rows: dispatcher}, "rounds": {rows: {verb: microseconds of the chosen dispatcher's}}}.

        Where there was nothing to choose "microseconds" and "rounds" are empty."""
        sizes = self._sizes if self._measured else []
        layers = {s: {name: 1e6 * row[s].layer for name, row in self._measured.items()} for s in sizes}
        used = {size: self._measured[self._chosen[size]][size] for size in sizes}
        rounds = {size: {verb: 1e6 * t for verb, t in vars(one).items()} for size, one in used.items()}
        return {"microseconds": layers, "chosen": dict(self._chosen), "rounds": rounds}

    def table(self) -> str:
        """The report for people: a line for each size, a column for each dispatcher."""
        width = max(map(len, self._measured), default=0) + 2
        lines = [f"{'rows':>6}" + "".join(f"{name:>{width}}" for name in self._measured)]
        for size, row in self.report()["microseconds"].items():
            cells = (f"{t:.1f}{'*' if name == self._chosen[size] else ' '}" for name, t in row.items())
            lines.append(f"{size:>6}" + "".join(f"{cell:>{width}}" for cell in cells))
        return "\n".join(lines)

    def failure(self) -> str | None:
        """What a kernel of theirs has waited for in vain, if one has."""
        return next(filter(None, (one.failure() for one in self._built.values())), None)

    def close(self) -> None:
        for one in self._built.values():
            one.close()


def _tried(name: str, parallel: ParallelState, limits: DispatchLimits) -> TokenDispatcher:
    """Built, and seen to work where a link may lose what it says it has taken."""
    built = dispatchers.build(name, parallel, limits)
    if parallel.device.type == "cuda" and not parallel.is_alone:
        try:
            try_once(built, limits, parallel)
        except RankError as error:
            raise ValueError(
                f"moe_comm={name!r} does not work here: {error}; see `python -m engine.doctor`."
            ) from error
    return built


def _why_alone(parallel: ParallelState) -> str:
    on_cpu = parallel.device.type != "cuda"
    return "gloo's times on a CPU say nothing of GPUs" if on_cpu else "no other dispatcher can run here"


def _agreed(names: list[str], parallel: ParallelState) -> list[str]:
    """Those that are candidates on every rank."""
    others = gather_json(names, parallel)
    return [name for name in names if all(name in theirs for theirs in others)]
