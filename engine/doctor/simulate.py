"""A slow link, injected: every round waits as long as a link of a given latency and bandwidth would take.

Advice can then be tried without such a machine. On a CPU the rank sleeps, on a GPU a kernel spins in the stream, so
that graphs hold the delay too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from engine.comm.parallel_state import ParallelState

HOPS = {"reference": (1, 0, 1), "allreduce": (2, 0, 2), "symm_replicated": (1, 0, 1), "symm_scatter": (2, 0, 2)}
"""Name -> times that a message waits for another in (reduce, dispatch, combine); a dispatcher that is not here shards
tokens: one hop a verb, and a gather at the end."""
SHARDED_HOPS = (1, 1, 2)
COLLECTIVE_HOPS = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1}
_VERBS = ("reduce", "dispatch", "combine")
_CALIBRATION_CYCLES = 20_000_000


@dataclass(frozen=True)
class SlowLink:
    """`latency_us` a hop, `gb_per_s` out of one rank; a call whose whole tensor is `cliff_bytes` or more takes
    `factor` times as long."""

    latency_us: float
    gb_per_s: float
    cliff_bytes: int | None = None
    factor: float = 1.0

    def seconds(self, hops: int, sent: int, message_bytes: int) -> float:
        """What a call adds in which a rank sends `sent` bytes, of a tensor of `message_bytes`."""
        time_taken = hops * self.latency_us * 1e-6 + sent / (self.gb_per_s * 1e9)
        past_cliff = self.cliff_bytes is not None and message_bytes >= self.cliff_bytes
        return time_taken * (self.factor if past_cliff else 1.0)

    def __str__(self) -> str:
        text = f"{self.latency_us:g} us a hop, {self.gb_per_s:g} GB/s out of a rank"
        return text if self.cliff_bytes is None else f"{text}, {self.factor:g}x from {self.cliff_bytes} bytes on"


def parse_link(text: str) -> SlowLink:
    """latency_us,GB/s[,cliff_bytes,factor]. Raises ValueError in one sentence."""
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 4) or not all(0 < number < 1e12 for number in numbers):
        raise ValueError(
            f"--simulate-link {text}: give latency_us,GB/s or latency_us,GB/s,cliff_bytes,factor, all above 0, for "
            "example 250,20,32768,8."
        )
    if len(numbers) == 2:
        return SlowLink(*numbers)
    return SlowLink(numbers[0], numbers[1], int(numbers[2]), numbers[3])


class Delay:
    """Waits on a device: the host sleeps for a CPU, a spinning kernel follows in a GPU's stream."""

    def __init__(self, device: torch.device):
        self._rate = _cycles_per_second(device) if device.type == "cuda" else 0.0

    def __call__(self, seconds: float) -> None:
        if self._rate:
            torch.cuda._sleep(int(seconds * self._rate))
        else:
            time.sleep(seconds)


def _cycles_per_second(device: torch.device) -> float:
    """Of the clock that the spinning kernel counts, measured while it spins."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # wakes the device
    start.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize(device)
    return _CALIBRATION_CYCLES / start.elapsed_time(end) * 1000


class ObservedDispatcher:
    """Passes a dispatcher on, notes what each verb sends, and delays it by a slow link where there is one.

    `sent` holds the bytes of the last call of each verb.
    """

    def __init__(
        self, inner: Any, parallel: ParallelState, message_bytes: int, link: SlowLink | None = None, delay: Any = None
    ):
        self.inner, self.sent = inner, dict.fromkeys(_VERBS, 0)
        self._parallel, self._message_bytes = parallel, message_bytes
        self._link, self._delay = link, delay

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reduce(self, *arguments: Any) -> Any:
        return self._observed("reduce", arguments)

    def dispatch(self, *arguments: Any) -> Any:
        return self._observed("dispatch", arguments)

    def combine(self, *arguments: Any) -> Any:
        return self._observed("combine", arguments)

    def _observed(self, verb: str, arguments: tuple) -> Any:
        before = sum(self._parallel.meter.bytes.values())
        result = getattr(self.inner, verb)(*arguments)
        self.sent[verb] = sent = sum(self._parallel.meter.bytes.values()) - before
        if self._link is not None and sent:
            hops = HOPS.get(self.inner.name, SHARDED_HOPS)[_VERBS.index(verb)]
            self._delay(self._link.seconds(hops, sent, self._message_bytes))
        return result
