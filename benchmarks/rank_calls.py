"""Ranks that stay and run one function after another: they start, import and meet once for many short measurements."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch

from benchmarks.rank_team import RankTeam
from engine.comm.parallel_state import ParallelState


class Caller:
    """One rank's side; keeps nothing between calls."""

    def __init__(self, parallel: ParallelState):
        self._parallel = parallel

    def call(self, work: str, settings: dict[str, Any]) -> Any:
        """What `work` ("module:function") returns for (parallel, **settings)."""
        module, function = work.split(":")
        result = getattr(importlib.import_module(module), function)(self._parallel, **settings)
        gc.collect()  # graphs and what they hold go before the next call
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()
        return result

    def close(self) -> None:
        """Nothing is left to give back."""


def team(tp: int, ep: int, device: str) -> RankTeam:
    return RankTeam("benchmarks.rank_calls:Caller", {}, tp, ep, device)


def call(ranks: RankTeam, work: str, settings: dict[str, Any], seconds: float) -> list[Any]:
    """What `work` returned on each rank, in rank order. Raises RuntimeError as the team does, whose ranks then start
    anew with the next call."""
    return ranks.call("call", {"work": work, "settings": settings}, seconds)
