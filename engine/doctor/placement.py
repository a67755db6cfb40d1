"""Where a model's experts lie over the ranks, and what a step of each placement reads and exchanges."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.bench.roofline import ShareSizes
from engine.doctor.experts import slowest_group


@dataclass(frozen=True)
class Round:
    """Of one verb of a dispatcher at one number of rows: seconds of the slowest rank, and bytes that a rank sends."""

    seconds: float
    sent: int


@dataclass(frozen=True)
class Rounds:
    """What a layer exchanges at one number of rows."""

    reduce: Round
    dispatch: Round
    combine: Round


@dataclass(frozen=True)
class Placement:
    """`tp` ranks in `ep` groups; `config` is the model's KimiConfig."""

    config: Any
    tp: int
    ep: int

    @property
    def name(self) -> str:
        if self.ep == 1:
            return f"TP{self.tp}"
        return f"EP{self.ep}" if self.ep == self.tp else f"EP{self.ep} x TP{self.tp // self.ep}"

    @property
    def sizes(self) -> ShareSizes:
        return ShareSizes(self.config, self.tp, self.ep)

    def verbs(self) -> tuple[int, int, int]:
        """(reduces, dispatches, combines) of a step: the dense layers' partials ride in a combine too."""
        layers = self.config.num_hidden_layers
        return layers, self.sizes.moe_layers, layers

    def bytes_read(self, rows: int, context: int, sequences: int = 1) -> float:
        """Weights and cache that the slowest rank reads in a step of `rows` rows over `sequences` contexts."""
        c, sizes = self.config, self.sizes
        experts = slowest_group(c.n_routed_experts, c.num_experts_per_tok, self.ep, rows)
        return sizes.weight_bytes(experts * sizes.moe_layers) + sizes.kv_bytes(sequences * context)

    def num_rounds(self, rounds: Rounds) -> int:
        """Of a step, those that carry bytes."""
        each = (rounds.reduce, rounds.dispatch, rounds.combine)
        return sum(count for count, one in zip(self.verbs(), each, strict=True) if one.sent)

    def expert_penalty(self, rows: int) -> float:
        """Routed bytes of the slowest rank over those of slices over all ranks."""
        c = self.config
        whole = slowest_group(c.n_routed_experts, c.num_experts_per_tok, self.ep, rows) * self.ep
        return whole / slowest_group(c.n_routed_experts, c.num_experts_per_tok, 1, rows)

    def comm_seconds(self, rounds: Rounds) -> float:
        """Of all rounds of a step."""
        return self._total(rounds.reduce.seconds, rounds.dispatch.seconds, rounds.combine.seconds)

    def comm_bytes(self, rounds: Rounds) -> float:
        """That one rank sends in a step."""
        return self._total(rounds.reduce.sent, rounds.dispatch.sent, rounds.combine.sent)

    def _total(self, reduce: float, dispatch: float, combine: float) -> float:
        reduces, dispatches, combines = self.verbs()
        return reduces * reduce + dispatches * dispatch + combines * combine


def placements(config: Any, tp: int) -> list[Placement]:
    """TP, the hybrid with the fewest expert groups, and EP, as far as the model divides."""
    divisors = [ep for ep in range(1, tp + 1) if tp % ep == 0]
    wanted = dict.fromkeys([1, *divisors[1:2], tp])
    return [Placement(config, tp, ep) for ep in wanted if config.n_routed_experts % ep == 0]


def fastest(measured: Mapping[str, Mapping[int, Rounds]], placement: Placement, rows: int) -> str | None:
    """The dispatcher whose rounds of a step of `rows` rows take least, of those measured at that size."""
    known = {name: by_rows[rows] for name, by_rows in measured.items() if rows in by_rows}
    return min(known, key=lambda name: placement.comm_seconds(known[name]), default=None)


def at_rows(by_rows: Mapping[int, float], rows: float) -> float:
    """The value at `rows`, between measured sizes on a straight line, past either end that end's own."""
    sizes = sorted(by_rows)
    if rows <= sizes[0]:
        return by_rows[sizes[0]]
    for low, high in itertools.pairwise(sizes):
        if rows <= high:
            return by_rows[low] + (by_rows[high] - by_rows[low]) * (rows - low) / (high - low)
    return by_rows[sizes[-1]]
