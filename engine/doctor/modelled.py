"""What a layer's rounds would take between eight GPUs, by a model: the project has measured two.

    python -m engine.doctor.modelled

A round takes what it takes among the ranks it was measured on, plus the bytes that more ranks make a rank send, over
the link's rate. Left out: waiting for more peers, contention between them, skew, and adding up more rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from engine.doctor.placement import Placement, Round, Rounds, at_rows
from engine.doctor.settings import Settings
from engine.doctor.simulate import HOPS, SHARDED_HOPS

RANKS = 8
ROWS = (1, 4, 8, 32, 128)
WAYS = {
    "one-shot": "symm_replicated",
    "two-shot": "symm_scatter",
    "sparse": "symm_sharded",
    "NCCL all-reduce": "allreduce",
}
_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Latency:
    """microseconds: rows -> a call among `ranks` ranks, which send over the same links; 1: its fixed part alone.
    bytes_per_us: what a rank sends."""

    microseconds: Mapping[int, float]
    ranks: int
    bytes_per_us: float


@dataclass(frozen=True)
class Links:
    """By dispatcher: the call after attention, and all calls between router and the next attention."""

    name: str
    reduce: Mapping[str, Latency]
    combine: Mapping[str, Latency]
    inputs: str


def _measured(*microseconds: float) -> Latency:
    """At 1, 8, 64 and 128 rows on two H200; 390 GB/s out of a GPU."""
    return Latency(dict(zip((1, 8, 64, 128), microseconds, strict=True)), 2, 390e3)


_ONE_SHOT, _TWO_SHOT = _measured(3.5, 4.0, 6.5, 9.6), _measured(4.5, 4.9, 7.0, 9.6)
_ALL_REDUCE = _measured(10.7, 10.4, 15.5, 28.0)
NVLINK = Links(
    "NVLink",
    {
        "symm_replicated": _ONE_SHOT,
        "symm_scatter": _TWO_SHOT,
        "symm_sharded": _TWO_SHOT,  # an upper bound: the first half of a two-shot sum
        "allreduce": _ALL_REDUCE,
    },
    {
        "symm_replicated": _ONE_SHOT,
        "symm_scatter": _TWO_SHOT,
        "symm_sharded": _measured(6.9, 8.0, 11.1, 15.6),
        "allreduce": _ALL_REDUCE,
    },
    "2x H200, CUDA graphs, torch 2.11, NCCL 2.28.9, 2026-11-30, at T = 1 / 8 / 64 / 128: a round of symm_replicated "
    "3.5 / 4.0 / 6.5 / 9.6 us, of symm_scatter 4.5 / 4.9 / 7.0 / 9.6, dispatch and combine of symm_sharded 6.9 / 8.0 / "
    "11.1 / 15.6, NCCL all-reduce 10.7 / 10.4 / 15.5 / 28.0; 390 GB/s out of a GPU. The reduce of symm_sharded is "
    "taken as long as symm_scatter's.",
)

PCIE_HOP_US, PCIE_US_PER_KB = 7.2, 0.26  # one-shot of 8 GPUs: a message goes to 7 peers
PCIE_NCCL_US, PCIE_NCCL_US_PER_KB = 24.1, 0.016
_PCIE_RATE = (RANKS - 1) * 1000 / PCIE_US_PER_KB


def _pcie(verbs: slice) -> dict[str, Latency]:
    ring = 2 * (RANKS - 1) / RANKS * 1000 / PCIE_NCCL_US_PER_KB
    own = {
        name: Latency({1: sum(HOPS.get(name, SHARDED_HOPS)[verbs]) * PCIE_HOP_US}, 1, _PCIE_RATE)
        for name in ("symm_replicated", "symm_scatter", "symm_sharded")
    }
    return own | {"allreduce": Latency({1: PCIE_NCCL_US}, 1, ring)}


PCIE = Links(
    "PCIe",
    _pcie(slice(0, 1)),
    _pcie(slice(1, 3)),
    "published for 8 GPUs: a one-shot sum takes 7.2 us + 0.26 us/kB (27 GB/s out of a GPU), NCCL's 24.1 us + 0.016 "
    "us/kB. A hop of the others is taken to cost the same 7.2 us: two-shot has 2 a round, sparse 1 in the reduce and 3 "
    "in dispatch and combine.",
)


def rows_sent(name: str, rows: int, ranks: int, experts: int, top_k: int) -> tuple[float, float]:
    """Rows that the busiest rank sends in (the call after attention, all others), uniform routing, whole experts."""
    share = -(-rows // ranks)
    if name == "symm_replicated":
        return (ranks - 1) * rows, (ranks - 1) * rows
    if name == "allreduce":
        return 2 * (ranks - 1) / ranks * rows, 2 * (ranks - 1) / ranks * rows
    to_owners, to_all = (ranks - 1) / ranks * rows, (ranks - 1) * share
    if name == "symm_scatter":
        return to_owners + to_all, to_owners + to_all
    wanted = wanted_ranks(ranks, experts, top_k)
    return to_owners, wanted * to_all + wanted * to_owners + to_all


def wanted_ranks(ranks: int, experts: int, top_k: int) -> float:
    """Share of the ranks that hold one of a row's experts: 1 - C(E - E/P, K) / C(E, K)."""
    return 1 - math.comb(experts - experts // ranks, top_k) / math.comb(experts, top_k)


def layer(name: str, links: Links, rows: int, placement: Placement) -> Rounds:
    """A layer's rounds over `links`; those of sparse dispatch and combine are counted as the combine's."""
    reduce, combine = (
        Round(_seconds(latency[name], part, name, rows, placement), 1)
        for part, latency in enumerate((links.reduce, links.combine))
    )
    return Rounds(reduce, Round(0.0, 0), combine)


def _seconds(latency: Latency, part: int, name: str, rows: int, placement: Placement) -> float:
    c = placement.config
    now, then = (
        rows_sent(name, rows, ranks, c.n_routed_experts, c.num_experts_per_tok)[part] if ranks > 1 else 0.0
        for ranks in (placement.tp, latency.ranks)
    )
    added = (now - then) * c.hidden_size * _BYTES / latency.bytes_per_us
    return (at_rows(latency.microseconds, rows) + added) * 1e-6


def table(placement: Placement) -> str:
    """Markdown: microseconds a layer / milliseconds a step."""
    lines = [f"| links | T | {' | '.join(WAYS)} |", "|---|---|" + "---|" * len(WAYS)]
    for links in (NVLINK, PCIE):
        for rows in ROWS:
            found = [layer(name, links, rows, placement) for name in WAYS.values()]
            cells = [
                f"{(one.reduce.seconds + one.combine.seconds) * 1e6:.1f} / {placement.comm_seconds(one) * 1e3:.2f}"
                for one in found
            ]
            lines.append(f"| {links.name} | {rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def full_model() -> Placement:
    """Kimi-K2.5 with whole experts on eight ranks."""
    return Placement(Settings(RANKS, RANKS, "cuda").model_config(), RANKS, RANKS)


def report() -> str:
    placement = full_model()
    heading = (
        f"MODELLED, not measured: {RANKS} ranks, us a layer / ms a step of {placement.config.num_hidden_layers} layers"
    )
    inputs = "\n".join(f"Inputs, {links.name}: {links.inputs}" for links in (NVLINK, PCIE))
    return f"{heading}\n\n{table(placement)}\n\n{inputs}"


if __name__ == "__main__":
    print(report())
