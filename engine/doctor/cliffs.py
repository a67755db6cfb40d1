"""Size cliffs of a latency curve: a message four times as large that costs eight times as much, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GROWTH, COST = 4, 8

GPU_CAUSES = (
    "Likely causes: peer access staged through host memory; the switch between NCCL's protocols (LL, LL128, Simple), "
    "which on some PCIe hosts makes 64 kB slower than 32 or 128 kB; a ring that NCCL laid over a slow link because it "
    "assumed a bandwidth for it."
)
GPU_REMEDIES = (
    "Remedies in this order: make peer access real (IOMMU and ACS off, the driver's ForceP2P setting; a small peer "
    "copy should take a few microseconds); NCCL_PROTO=LL,LL128,Simple, and a newer NCCL or a graph file for the ring; "
    "a one-shot dispatcher (symm_replicated) for messages below 56 kB; every step in a CUDA graph."
)
CPU_CAUSES = (
    "These are ranks on processors: sockets and shared cores make such jumps, and no setting of GPUs mends them; run "
    "this where the GPUs are."
)


@dataclass(frozen=True)
class Cliff:
    """Between two message sizes of one curve."""

    name: str
    small_bytes: int
    large_bytes: int
    small_seconds: float
    large_seconds: float

    @property
    def cost(self) -> float:
        return self.large_seconds / self.small_seconds

    def sentence(self) -> str:
        text = (
            f"{self.name}: {_size(self.small_bytes)} takes {self.small_seconds * 1e6:.0f} us and "
            f"{_size(self.large_bytes)} takes {self.large_seconds * 1e6:.0f} us: {GROWTH}x the message at "
            f"{self.cost:.1f}x the time is a cliff."
        )
        split = GROWTH * self.small_seconds
        return f"{text} {GROWTH} calls of {_size(self.small_bytes)} would take {split * 1e6:.0f} us."


def find_cliffs(name: str, seconds_by_rows: Mapping[int, float], row_bytes: int) -> list[Cliff]:
    """The cliffs of a curve over rows, the steepest one where several overlap, smallest message first."""
    found = [
        Cliff(name, rows * row_bytes, GROWTH * rows * row_bytes, seconds, seconds_by_rows[GROWTH * rows])
        for rows, seconds in sorted(seconds_by_rows.items())
        if seconds_by_rows.get(GROWTH * rows, 0) >= COST * seconds > 0
    ]
    kept: list[Cliff] = []
    for cliff in found:
        if kept and cliff.small_bytes < kept[-1].large_bytes:
            kept[-1] = max(kept[-1], cliff, key=lambda one: one.cost)
        else:
            kept.append(cliff)
    return kept


def explain(cliffs: list[Cliff], is_gpu_link: bool) -> list[str]:
    """Sentences: each cliff, then once what may cause it and what to do."""
    if not cliffs:
        return [f"No size cliff: nowhere does {GROWTH}x the message cost {COST}x the time."]
    return [*(cliff.sentence() for cliff in cliffs), *((GPU_CAUSES, GPU_REMEDIES) if is_gpu_link else (CPU_CAUSES,))]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.3g} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.3g} kB"
