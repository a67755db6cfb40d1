"""How much memory a rank's GPU has for the KV cache: what weights, the largest step and the graphs take, measured.

The order matters. Steps come first, since they load what libraries load once; then all graphs are captured for trial
over a cache of two blocks, and dropped; what is left is the cache's. Graphs are captured again over the real cache,
whose address they hold.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from engine import cache_plan, rehearsal
from engine.cache_plan import GIB, EngineLimits, MemoryUse
from engine.comm.collectives import agree_on_minimum
from engine.config import ConfigError
from engine.graph import Recorder
from engine.log import logger
from engine.model_files import ModelFiles

_TRIAL_BLOCKS = 2


class Gauge(Protocol):
    """What a device's memory holds, in bytes."""

    total: int

    def tensors(self) -> int:
        """Held by tensors of this process."""

    def in_use(self) -> int:
        """By anyone, the allocator's idle memory given back before."""

    def peak(self, call: Callable[[], Any]) -> int:
        """What the call takes from the device at its peak, beyond what was in use."""


class GpuGauge:
    """A peak counts the allocator's whole segments, which is what the device must have free."""

    def __init__(self, device: torch.device):
        self._device = device
        self.total = torch.cuda.mem_get_info(device)[1]

    def tensors(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def in_use(self) -> int:
        gc.collect()  # a graph that something still refers to keeps its memory
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return self.total - torch.cuda.mem_get_info(self._device)[0]

    def peak(self, call: Callable[[], Any]) -> int:
        self.in_use()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        call()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before

    def keep_free(self, num_bytes: int) -> None:
        """From now on this process's allocator gives idle memory back rather than leave the driver less than that."""
        others = self.in_use() - torch.cuda.memory_reserved(self._device)
        share = (self.total - others - num_bytes) / self.total
        torch.cuda.set_per_process_memory_fraction(min(max(share, 0.0), 1.0), self._device)

    def keep_nothing_free(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)


def measure(runner: Any, gauge: Gauge, recorder: Recorder | None) -> MemoryUse:
    """What there is before a KV cache. Leaves the runner without caches and graphs. recorder: of the trial; None where
    nothing is captured. All ranks call it together.

    Raises ConfigError where a step does not even fit beside the weights."""
    gauge.in_use()
    weights = gauge.tensors()
    step = _largest_step(runner, gauge, weights)
    used = gauge.in_use()
    graphs = 0 if recorder is None else _trial(runner, gauge, recorder, used)
    used = gauge.in_use()
    margin = cache_plan.margin_bytes(gauge.total)
    return MemoryUse(gauge.total, weights, max(used - weights, 0), step, graphs, margin)


@torch.inference_mode()
def _largest_step(runner: Any, gauge: Gauge, weights: int) -> int:
    started, found = time.monotonic(), {}
    runner.hold_caches(_TRIAL_BLOCKS)
    try:
        for name, output in rehearsal.largest_steps(runner):
            found[name] = gauge.peak(lambda output=output: runner.execute(output).read())
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step ({name}) does not fit beside {weights / GIB:.2f} GiB of weights in {gauge.total / GIB:.2f} GiB of "
            "memory; use more ranks, or lower max_num_batched_tokens or max_num_seqs."
        ) from error
    finally:
        runner.drop_caches()
    each = ", ".join(f"{name} {num_bytes / GIB:.2f}" for name, num_bytes in found.items())
    logger.info("the largest steps take, in GiB: %s (rehearsed in %.1f s)", each, time.monotonic() - started)
    return max(found.values())


def _trial(runner: Any, gauge: Gauge, recorder: Recorder, used: int) -> int:
    """What all graphs take, with their inputs and the memory that a capture leaves behind in the driver."""
    started = time.monotonic()
    runner.max_model_len = rehearsal.most_positions(runner)
    runner.hold_caches(_TRIAL_BLOCKS)
    before = gauge.in_use()
    runner.capture_all(recorder)
    taken = gauge.in_use() - before
    runner.drop_graphs()
    runner.drop_caches()
    recorder.drop()
    kept = gauge.in_use() - used
    logger.info(
        "graphs take %.1f MiB, as a trial of %.1f s shows; %.1f MiB of it stay with the driver",
        taken / 2**20,
        time.monotonic() - started,
        kept / 2**20,
    )
    return max(taken, 0)


def settle(runner: Any, files: ModelFiles, use: MemoryUse | None) -> EngineLimits:
    """The limits that every rank can keep to; use: of this rank, None where it is not measured.

    Raises ConfigError with the sum, on every rank alike."""
    config, parallel = runner.config, runner.parallel
    block_bytes = cache_plan.block_bytes(config, files, runner.model, runner.drafter)
    known = cache_plan.known_bytes(config)
    budget = use.available if known is None else known
    fitting = agree_on_minimum(max(budget, 0) // block_bytes, parallel)
    limits, refusal = None, None
    try:
        limits = cache_plan.plan(config, files, block_bytes, budget, fitting, use)
    except ConfigError as error:
        refusal = error
    if not agree_on_minimum(int(refusal is None), parallel):
        raise refusal or ConfigError("another rank has no room for a KV cache of this size; see its log.")
    return limits
