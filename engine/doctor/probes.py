"""What all ranks measure together. A probe runs on every rank at the same time and returns the same JSON on each.

`PROBES` maps a probe's name to its function; a name may end in one argument after a colon. One that cannot run raises
collectives.RankError with the reason on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from engine.bench.gpu_timing import read_bandwidth
from engine.comm.collectives import all_gather, all_reduce, all_to_all, together
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, build, dispatcher_class
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import time_calls, time_dispatcher
from engine.doctor.placement import Round, Rounds
from engine.doctor.settle import symmetric_memory
from engine.doctor.simulate import COLLECTIVE_HOPS, Delay, ObservedDispatcher, SlowLink

_REPLAYS, _CALLS = 20, 8
_FEW_REPLAYS, _FEW_CALLS = 3, 2  # where a round takes milliseconds: on a CPU, and over a simulated link


@dataclass(frozen=True)
class Bench:
    """One rank's place, what its dispatchers are built for, the sizes to measure and the link to simulate."""

    parallel: ParallelState
    limits: DispatchLimits
    rows: tuple[int, ...]
    link: SlowLink | None = None
    delay: Delay | None = None

    @property
    def is_slow(self) -> bool:
        return self.parallel.device.type == "cpu" or self.link is not None

    @property
    def replays(self) -> int:
        return _FEW_REPLAYS if self.is_slow else _REPLAYS

    @property
    def calls(self) -> int:
        return _FEW_CALLS if self.is_slow else _CALLS

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one of several calls in a row, in a CUDA graph on a GPU."""
        return time_calls([call] * self.calls, self.parallel, self.replays)

    def zeros(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, self.limits.width, dtype=self.limits.dtype, device=self.parallel.device)

    @property
    def row_bytes(self) -> int:
        return self.limits.width * self.limits.dtype.itemsize

    def padded(self, rows: int) -> int:
        """Rows that divide by the ranks."""
        return -(-rows // self.parallel.tp) * self.parallel.tp


def first_all_reduce(bench: Bench) -> dict[str, Any]:
    """Eight bytes: whether the ranks can talk at all."""
    x = torch.ones(2, device=bench.parallel.device)
    summed = together(lambda: all_reduce(x, bench.parallel)[0].tolist(), bench.parallel)
    return {"sum": summed[0]}


def read_rate(bench: Bench) -> dict[str, Any]:
    """Streaming read of every rank's device, all at the same time."""
    rates = together(lambda: read_bandwidth(bench.parallel.device), bench.parallel)
    return {"bytes_per_second": rates}


def collective(bench: Bench, name: str) -> dict[int, float]:
    """Rows -> seconds of a plain collective whose whole tensor has so many rows (rounded up to the ranks)."""
    return {rows: bench.seconds(_collective_call(bench, name, rows)) for rows in bench.rows}


def _collective_call(bench: Bench, name: str, rows: int) -> Callable[[], object]:
    parallel, padded = bench.parallel, bench.padded(rows)
    whole, part = bench.zeros(rows if name == "all-reduce" else padded), bench.zeros(padded // parallel.tp)
    calls = {
        "all-reduce": lambda: all_reduce(whole, parallel),
        "all-gather": lambda: all_gather(part, parallel),
        "all-to-all": lambda: all_to_all(whole.view(parallel.tp, -1, whole.shape[1]), parallel),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=parallel.group),
    }
    return _delayed(bench, name, calls[name], rows)


def _delayed(bench: Bench, name: str, call: Callable[[], object], rows: int) -> Callable[[], object]:
    if bench.link is None:
        return call
    hops, message = COLLECTIVE_HOPS[name], rows * bench.row_bytes
    seconds = bench.link.seconds(hops, hops * (bench.parallel.tp - 1) * message // bench.parallel.tp, message)

    def slow() -> None:
        call()
        bench.delay(seconds)

    return slow


def dispatcher(bench: Bench, name: str) -> dict[int, dict[str, Any]]:
    """Rows -> Rounds of a dispatcher, as dictionaries. Raises RankError with the reason where it cannot run."""
    parallel, built = bench.parallel, []
    together(lambda: built.append(build(name, parallel, bench.limits)), parallel)
    try:
        return {rows: asdict(_rounds(bench, built[0], rows)) for rows in bench.rows}
    finally:
        built[0].close()


def _rounds(bench: Bench, inner: Any, rows: int) -> Rounds:
    observed = ObservedDispatcher(inner, bench.parallel, rows * bench.row_bytes, bench.link, bench.delay)
    times = time_dispatcher(observed, rows, bench.limits, bench.parallel, replays=bench.replays, calls=bench.calls)
    return Rounds(*(Round(getattr(times, verb), observed.sent[verb]) for verb in ("reduce", "dispatch", "combine")))


def obstacles(bench: Bench) -> dict[str, str | None]:
    """Every dispatcher with the reason why it cannot run on these ranks, None where it can."""
    parallel = bench.parallel
    own = {name: dispatcher_class(name).obstacle(parallel, bench.limits) for name in DISPATCHERS}
    of_ranks = together(lambda: own, parallel)
    return {name: next((one[name] for one in of_ranks if one[name]), None) for name in DISPATCHERS}


def unfused(bench: Bench, rows_text: str) -> dict[int, float]:
    """Rows -> seconds of the library's all-reduce, a residual sum and an RMSNorm, each its own kernel."""
    from engine.kernels import table

    parallel = bench.parallel
    kernels = table.KERNELS[table.choose(parallel.device, bench.limits.dtype)]()
    weight = torch.ones(bench.limits.width, dtype=bench.limits.dtype, device=parallel.device)

    def seconds(rows: int) -> float:
        x, residual = bench.zeros(rows), bench.zeros(rows)
        return bench.seconds(lambda: kernels.rms_norm(all_reduce(x, parallel)[0] + residual, weight, 1e-6))

    return {rows: seconds(rows) for rows in map(int, rows_text.split(","))}


def symmetric(bench: Bench) -> dict[str, Any]:
    """torch's symmetric memory, as `settle.symmetric_memory` measures it."""
    return symmetric_memory(bench.parallel, bench.rows, bench.limits.width, bench.seconds)


PROBES: dict[str, Callable[..., Any]] = {
    "first all-reduce": first_all_reduce,
    "read rate": read_rate,
    "obstacles": obstacles,
    "collective": collective,
    "dispatcher": dispatcher,
    "unfused": unfused,
    "symmetric memory": symmetric,
}


def run_probe(bench: Bench, name: str) -> Any:
    """Runs "NAME" or "NAME:ARGUMENT"."""
    name, _, argument = name.partition(":")
    return PROBES[name](bench, argument) if argument else PROBES[name](bench)
