"""Which dispatcher a step of so many rows uses."""

from __future__ import annotations

from engine.comm import dispatcher as dispatchers
from engine.comm.dispatcher import DispatchLimits, TokenDispatcher
from engine.comm.parallel_state import ParallelState


def candidates(name: str, parallel: ParallelState) -> list[str]:
    """The dispatchers that `moe_comm=name` may use; their layers hold the same weights."""
    if name != "auto":
        return [name]
    return ["reference" if parallel.is_alone else "allreduce"]


class DispatcherChoice:
    """The dispatchers of an engine, built collectively.

    `shards_tokens` and `local_experts` are the same for all of them.
    """

    def __init__(self, name: str, parallel: ParallelState, limits: DispatchLimits):
        self._built = [dispatchers.build(one, parallel, limits) for one in candidates(name, parallel)]

    @property
    def name(self) -> str:
        return ", ".join(one.name for one in self._built)

    @property
    def is_capturable(self) -> bool:
        return all(one.is_capturable for one in self._built)

    @property
    def local_experts(self) -> range:
        return self._built[0].local_experts

    def for_rows(self, num_rows: int) -> TokenDispatcher:
        """The dispatcher of a step of `num_rows` rows, padding included; the same on every rank."""
        return self._built[0]

    def close(self) -> None:
        for one in self._built:
            one.close()
