"""Who this rank is, and which part of heads, vocabulary and experts is its own. Knows no tensor and no model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from engine.comm.meter import CommMeter


@dataclass(frozen=True)
class ParallelState:
    """One rank's place in a world of `tp` ranks.

    Attention is split over all ranks. Experts are split over `ep` groups of `expert_tp` = tp / ep ranks: ranks of one
    group hold the same experts, each its slice of their columns. A share is one rank of such a world without the
    others: its collectives exchange nothing.
    """

    rank: int = 0
    tp: int = 1
    ep: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    meter: CommMeter = field(default_factory=CommMeter)
    is_share: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to exchange anything with."""
        return self.tp == 1 or self.is_share

    @property
    def expert_tp(self) -> int:
        return self.tp // self.ep

    @property
    def ep_rank(self) -> int:
        return self.rank // self.expert_tp

    @property
    def expert_tp_rank(self) -> int:
        return self.rank % self.expert_tp

    def split(self, size: int, what: str) -> slice:
        """This rank's even share of `size`. Raises ValueError with the sum when it does not divide."""
        return even_slice(size, self.tp, self.rank, f"{what} (tp={self.tp})")

    def expert_range(self, num_experts: int) -> range:
        """The experts this rank holds, whole or sliced."""
        share = even_slice(num_experts, self.ep, self.ep_rank, f"routed experts (ep={self.ep})")
        return range(share.start, share.stop)

    def expert_columns(self, width: int, group_size: int) -> slice:
        """This rank's columns of each of its experts: whole quantisation groups. Raises ValueError with the sum."""
        if width % self.expert_tp or (width // self.expert_tp) % group_size:
            raise ValueError(
                f"tp={self.tp} with ep={self.ep} slices every expert into {self.expert_tp} parts, and {width} / "
                f"{self.expert_tp} = {width / self.expert_tp:g} columns are not whole groups of {group_size}; "
                f"raise ep so that tp / ep is at most {max_parts(width, group_size)}."
            )
        return even_slice(width, self.expert_tp, self.expert_tp_rank, "expert columns")


def even_slice(size: int, parts: int, index: int, what: str) -> slice:
    if size % parts:
        raise ValueError(
            f"{size} {what} cannot be split into {parts} equal parts: {size} / {parts} = {size / parts:g}."
        )
    share = size // parts
    return slice(index * share, (index + 1) * share)


def max_parts(width: int, group_size: int) -> int:
    """The largest number of even slices of `width` that are whole groups."""
    groups = width // group_size if width % group_size == 0 else 1
    return max(groups, 1)
