"""What was measured, put in order: latency curves, the fastest dispatchers, and the machine the forecast needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.comm.dispatcher import DISPATCHERS, dispatcher_class
from engine.doctor.forecast import Efficiency, Machine
from engine.doctor.placement import Placement, Round, Rounds, fastest
from engine.doctor.settings import Settings
from engine.doctor.simulate import COLLECTIVE_HOPS
from engine.doctor.team import Outcome, World

H200_EFFICIENCY = Efficiency(
    {1: 0.351, 4: 0.415, 8: 0.496, 64: 0.656},
    "one rank's share of the full model on an H200, measured without communication (benchmarks/step_tp8_h200.json)",
)


@dataclass(frozen=True)
class Findings:
    """collectives: name -> rows -> seconds. dispatchers: name -> rows -> Rounds. refused: name -> why.
    read_rates: bytes a second of every rank's device. failed: why nothing could be measured, if so."""

    collectives: dict[str, dict[int, float]]
    dispatchers: dict[str, dict[int, Rounds]]
    refused: dict[str, str]
    read_rates: list[float]
    failed: str | None = None

    def round_seconds(self) -> dict[int, float]:
        """Rows -> the fastest sum over all ranks: a dispatcher's reduce, where every rank keeps every row."""
        whole = [by_rows for name, by_rows in self.dispatchers.items() if not dispatcher_class(name).shards_tokens]
        rows = sorted({t for by_rows in whole for t in by_rows})
        return {t: min(by_rows[t].reduce.seconds for by_rows in whole if t in by_rows) for t in rows}

    def sizes(self) -> list[int]:
        return sorted({t for by_rows in self.dispatchers.values() for t in by_rows})

    def winners(self, placement: Placement) -> dict[int, str]:
        """Rows -> the fastest dispatcher."""
        return {t: fastest(self.dispatchers, placement, t) for t in self.sizes()}

    def replicated_winners(self, placement: Placement) -> dict[int, str]:
        """Rows -> the fastest dispatcher that keeps every row on every rank, the only ones `auto` takes.

        Where tokens are sharded a rank reads the whole shared expert, which few rows do not pay for. `reference` is
        the oracle and counts where there is no other."""
        kept = {name: one for name, one in self.dispatchers.items() if not dispatcher_class(name).shards_tokens}
        kept = {name: one for name, one in kept.items() if name != "reference"} or kept
        found = {t: fastest(kept, placement, t) for t in self.sizes()}
        return {t: name for t, name in found.items() if name is not None}

    def machine(self, placement: Placement) -> Machine:
        """With the fastest dispatcher of replicated rows at every size. A rank that is alone exchanges nothing."""
        comm, one = {1: 0.0}, {1: 0.0}
        if placement.tp > 1:
            winners = self.replicated_winners(placement)
            comm = {t: placement.comm_seconds(self.dispatchers[name][t]) for t, name in winners.items()}
            one = self.round_seconds()
        return Machine(min(self.read_rates), H200_EFFICIENCY, comm, one)


def measuring_world(settings: Settings) -> World:
    """Every probe of the latency table. The first one is cheap: ranks that cannot talk at all are found by it."""
    collectives = [f"collective:{name}" for name in COLLECTIVE_HOPS] if settings.tp > 1 else []
    dispatchers = [f"dispatcher:{name}" for name in settings.dispatchers]
    return World(("first all-reduce", "read rate", "obstacles", *collectives, *dispatchers))


def findings(outcomes: Mapping[str, Outcome]) -> Findings:
    """Of a measuring world's outcomes."""
    values = {key: one.value for key, one in outcomes.items() if one.failed is None}
    collectives = {
        name: {int(t): seconds for t, seconds in values[f"collective:{name}"].items()}
        for name in COLLECTIVE_HOPS
        if f"collective:{name}" in values
    }
    dispatchers = {
        name: {int(t): _rounds(one) for t, one in values[f"dispatcher:{name}"].items()}
        for name in DISPATCHERS
        if f"dispatcher:{name}" in values
    }
    rates = values.get("read rate", {}).get("bytes_per_second", [])
    return Findings(collectives, dispatchers, _refused(outcomes), rates, _failure(outcomes, dispatchers, rates))


def _rounds(value: Mapping[str, Any]) -> Rounds:
    return Rounds(*(Round(**value[verb]) for verb in ("reduce", "dispatch", "combine")))


def _refused(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """Dispatchers and collectives without a figure, with the reason: their own words where they have some."""
    clauses = outcomes["obstacles"].value or {}
    failed = {
        key.partition(":")[2]: one.failed
        for key, one in outcomes.items()
        if key.startswith(("collective:", "dispatcher:")) and one.failed is not None
    }
    return {name: clauses.get(name) or reason for name, reason in failed.items()}


def _failure(outcomes: Mapping[str, Outcome], dispatchers: dict, rates: list[float]) -> str | None:
    first = outcomes["first all-reduce"].failed
    if first is not None:
        return (
            f"The ranks could not do a first all-reduce of 8 bytes: {first}. On GPUs try NCCL_P2P_DISABLE=1; if that "
            "helps, switch IOMMU and ACS off or use another NCCL."
        )
    if not rates:
        return f"The memory's read rate could not be measured: {outcomes['read rate'].failed}."
    if all(dispatcher_class(name).shards_tokens for name in dispatchers):
        reasons = [one.failed for key, one in outcomes.items() if key.startswith("dispatcher:") and one.failed]
        return f"No dispatcher that keeps every row on every rank could be measured: {reasons[0]}."
    return None
