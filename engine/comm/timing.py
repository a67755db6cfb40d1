"""Times what all ranks do together: the slowest rank's median, the same number on every rank.

Shape letters as in dispatcher.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.comm.collectives import together
from engine.comm.dispatcher import DispatchLimits, TokenDispatcher
from engine.comm.parallel_state import ParallelState
from engine.kernels import table as kernel_table
from engine.kernels.reference import local_ids
from engine.kernels.table import Kernels
from engine.timing import Call, capture, clocked, replayed, run_all, synchronize

REPLAYS = 20
_CALLS = 8  # in one graph: a round follows a round, as in a step
_EPS = 1e-6


@dataclass(frozen=True)
class RoundTimes:
    """Seconds of one call of each verb, on the slowest rank. A layer takes all three."""

    reduce: float
    dispatch: float
    combine: float

    @property
    def layer(self) -> float:
        return self.reduce + self.dispatch + self.combine


def time_calls(calls: Sequence[Call], parallel: ParallelState, replays: int = REPLAYS, use_graph: bool = True) -> float:
    """Seconds of one of `calls`, which all ranks make at the same time: the median of `replays` runs of all of them,
    of the slowest rank.

    On a GPU the calls are captured in one CUDA graph and replayed (with `use_graph`; a call may then not wait for the
    device); on a CPU the clock is read. The calls must keep their inputs alive, and run here first. Raises
    collectives.RankError on every rank where a call raises on any.
    """
    ready: list[Call] = []
    together(lambda: ready.append(_prepare(calls, parallel.device, use_graph)), parallel)  # also aligns the ranks
    return max(together(lambda: _median(ready[0], parallel.device, replays) / len(calls), parallel))


def _prepare(calls: Sequence[Call], device: torch.device, use_graph: bool) -> Call:
    """Warms the calls up and returns what runs all of them."""
    run_all(calls)
    synchronize(device)
    if device.type == "cuda" and use_graph:
        return capture(calls).replay
    return lambda: run_all(calls)


def _median(run: Call, device: torch.device, replays: int) -> float:
    samples = replayed(run, replays) if device.type == "cuda" else [clocked([run]) for _ in range(replays)]
    return statistics.median(samples)


@torch.inference_mode()
def time_dispatcher(
    dispatcher: TokenDispatcher,
    num_rows: int,
    limits: DispatchLimits,
    parallel: ParallelState,
    seed: int = 0,
    replays: int = REPLAYS,
    calls: int = _CALLS,
) -> RoundTimes:
    """Times a dispatcher's verbs with `num_rows` random rows of all ranks together and uniformly random routing.

    Every rank calls it; each draws its own partials from `seed`. A combine always follows its dispatch, as in a step,
    so what a dispatch takes is found by itself and a combine is the rest of both. Where every rank holds every row a
    dispatch brings nothing, and all of both is the combine's. Raises collectives.RankError as `time_calls` does, and
    where a kernel has waited in vain, after the first round rather than after all of them.
    """
    made: list[_Rounds] = []

    def make() -> None:
        made.append(_Rounds(dispatcher, num_rows, limits, parallel, seed))
        _check(dispatcher, parallel.device)

    with parallel.meter.apart():
        together(make, parallel)
        rounds = made[0]

        def timed(call: Call) -> float:
            return time_calls([call] * calls, parallel, replays, dispatcher.is_capturable)

        reduce, both = timed(rounds.reduce), timed(rounds.dispatch_and_combine)
        dispatch = min(timed(rounds.dispatch), both) if dispatcher.shards_tokens else 0.0
        together(lambda: _check(dispatcher, parallel.device), parallel)
    return RoundTimes(reduce, dispatch, both - dispatch)


@torch.inference_mode()
def try_once(dispatcher: TokenDispatcher, limits: DispatchLimits, parallel: ParallelState, seed: int = 0) -> None:
    """A layer's rounds of one row. Raises collectives.RankError on every rank where they do not come through on one."""

    def rounds() -> None:
        _Rounds(dispatcher, 1, limits, parallel, seed)
        _check(dispatcher, parallel.device)

    with parallel.meter.apart():
        together(rounds, parallel)


def _check(dispatcher: TokenDispatcher, device: torch.device) -> None:
    """Raises RuntimeError where a kernel of the dispatcher gave up."""
    synchronize(device)
    if (reason := dispatcher.failure()) is not None:
        raise RuntimeError(reason)


class _Rounds:
    """The verbs of one step's layer, on rows that stay the same."""

    def __init__(
        self,
        dispatcher: TokenDispatcher,
        num_rows: int,
        limits: DispatchLimits,
        parallel: ParallelState,
        seed: int,
    ):
        self._dispatcher, self._device, self._dtype = dispatcher, parallel.device, limits.dtype
        self._same, self._own = (
            torch.Generator(parallel.device).manual_seed(one) for one in (seed, seed + 1 + parallel.rank)
        )
        self._norm = _Norm(limits, parallel.device)
        _, self._residual_tD = dispatcher.enter(self._rows(num_rows, limits.width, self._same), self._norm)
        self._attention_TD = self._rows(num_rows, limits.width, self._own)
        num_tokens_1 = torch.tensor([num_rows], dtype=torch.int32, device=parallel.device)
        self._x_tD, _ = dispatcher.reduce(self._attention_TD, self._residual_tD, self._norm)
        self._ids_tK, self._weights_tK = self._routing(limits, dispatcher.num_held(num_tokens_1))
        self._experts_RD = self._rows(self.dispatch().x_RD.shape[0], limits.width, self._own)
        self.dispatch_and_combine()

    def reduce(self) -> None:
        self._dispatcher.reduce(self._attention_TD, self._residual_tD, self._norm)

    def dispatch(self):
        return self._dispatcher.dispatch(self._x_tD, self._ids_tK, self._weights_tK)

    def dispatch_and_combine(self) -> None:
        self._dispatcher.combine(self._experts_RD, self.dispatch().handle, self._residual_tD, self._norm)

    def _rows(self, num_rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(num_rows, width, generator=generator, device=self._device).to(self._dtype)

    def _routing(self, limits: DispatchLimits, num_held_1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids counted in local_experts, -1 elsewhere and for padding; equal weights. All ranks route a row that all
        hold alike."""
        held, top_k = self._x_tD.shape[0], limits.top_k
        generator = self._own if self._dispatcher.shards_tokens else self._same
        scores_tE = torch.rand(held, limits.num_experts, generator=generator, device=self._device)
        ids_tK = local_ids(scores_tE.topk(top_k).indices, self._dispatcher.local_experts, num_held_1)
        return ids_tK, torch.full(ids_tK.shape, 1 / top_k, dtype=torch.float32, device=self._device)


class _Norm:
    """RMSNorm with a weight of ones, by the kernels that a model's layers would use here."""

    def __init__(self, limits: DispatchLimits, device: torch.device):
        self._kernels: Kernels = kernel_table.KERNELS[kernel_table.choose(device, limits.dtype)]()
        self.eps = _EPS
        self.weight = torch.ones(limits.width, dtype=limits.dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, self.weight, self.eps)

    def add(self, partial: torch.Tensor, residual_tD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.add_norm(partial, residual_tD, self.weight, self.eps)
