"""What a process takes of the host's memory and of its GPU while something runs: the peaks, and points in between."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

INTERVAL_SECONDS = 0.02
POINTS = 20


@dataclass
class MemoryTrace:
    """Of a `with` block. All bytes are beyond those at its begin; a GPU's are the allocator's. Pinned ones are the most
    that torch has had at once, and lie within the host's: a process's resident memory grows by them."""

    on_gpu: bool
    host_peak: int = 0
    gpu_peak: int = 0
    pinned_peak: int = 0
    _points: list[tuple[float, int, int]] = field(default_factory=list)

    def __enter__(self) -> MemoryTrace:
        with suppress(OSError):  # without it the peak is the largest of the points
            Path("/proc/self/clear_refs").write_text("5")
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        self._host, self._gpu, self._began = _status("VmRSS"), self._gpu_bytes(), time.monotonic()
        self._reset = _status("VmHWM") <= self._host + 2**20
        self._look()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-trace", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        self.host_peak = max(host for _, host, _ in self._points)
        if self._reset:
            self.host_peak = max(self.host_peak, _status("VmHWM") - self._host)
        if self.on_gpu:
            self.gpu_peak = torch.cuda.max_memory_allocated() - self._gpu
            self.pinned_peak = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)

    @property
    def points(self) -> list[list[float]]:
        """[seconds, host bytes, GPU bytes], at most POINTS, the first and the last among them."""
        last, count = len(self._points) - 1, min(POINTS, len(self._points))
        chosen = [self._points[i * last // max(count - 1, 1)] for i in range(count)]
        return [[round(seconds, 3), host, gpu] for seconds, host, gpu in chosen]

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        seconds = time.monotonic() - self._began
        self._points.append((seconds, _status("VmRSS") - self._host, self._gpu_bytes() - self._gpu))

    def _gpu_bytes(self) -> int:
        return torch.cuda.memory_allocated() if self.on_gpu else 0


def _status(name: str) -> int:
    """Bytes; a system without /proc has none to tell."""
    with suppress(OSError), open("/proc/self/status") as lines:
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)
    return 0
