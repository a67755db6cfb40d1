"""`python -m engine.doctor.pairs`: facts of the GPUs and copies between every ordered pair, one JSON object a line.

A process of its own, because a broken path can hang a copy for good; `links.py` watches the lines.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

LARGE_BYTES, SMALL_BYTES = 64 * 2**20, 16 * 2**10
_COPIES = 8
_LOADS = 256


def gpu_facts(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
    }


def measure_pair(source: int, target: int) -> dict[str, Any]:
    """Whether `source` may reach `target`'s memory, the rate of large copies and the time of small ones."""
    return {
        "peer": torch.cuda.can_device_access_peer(source, target),
        "bytes_per_second": LARGE_BYTES / _copy_seconds(source, target, LARGE_BYTES),
        "small_seconds": _copy_seconds(source, target, SMALL_BYTES),
    }


def _copy_seconds(source: int, target: int, num_bytes: int) -> float:
    """The median of single copies until the host sees their end."""
    x = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{source}")
    out = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{target}")
    samples = []
    for _ in range(_COPIES + 2):
        torch.cuda.synchronize(source)
        start = time.perf_counter()
        out.copy_(x, non_blocking=True)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        samples.append(time.perf_counter() - start)
    return sorted(samples[2:])[_COPIES // 2]


def load_seconds(source: int, target: int) -> float:
    """One read of `target`'s memory by a kernel on `source`, from a chain of reads that wait for each other."""
    from engine.kernels.gpu.remote_load import chase

    with torch.cuda.device(source):
        zeros = torch.zeros(1, dtype=torch.int32, device=f"cuda:{target}")
        out = torch.zeros(1, dtype=torch.int32, device=f"cuda:{source}")
        torch.cuda.synchronize(target)
        chase(zeros, out, _LOADS)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        chase(zeros, out, _LOADS)
        end.record()
        torch.cuda.synchronize(source)
        return start.elapsed_time(end) / 1000 / _LOADS


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies between pairs of GPUs, for the doctor.")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--skip", default="[]", help="JSON list of pairs that are not to be tried")
    parser.add_argument("--no-loads", action="store_true", help="copies alone, no reads by kernels")
    args = parser.parse_args()
    skip = [tuple(pair) for pair in json.loads(args.skip)]
    for index in range(args.gpus):  # contexts and the kernel take longer to make than a pair may take
        torch.zeros(1, device=f"cuda:{index}")
        if not args.no_loads:
            load_seconds(index, index)
    _say(gpus=[gpu_facts(index) for index in range(args.gpus)])
    for source in range(args.gpus):
        for target in range(args.gpus):
            if source != target and (source, target) not in skip:
                _try_pair(source, target, not args.no_loads)
    _say(done=True)


def _try_pair(source: int, target: int, with_loads: bool) -> None:
    _say(pair=[source, target])
    result = measure_pair(source, target)
    _say(pair=[source, target], **result)
    if with_loads and result["peer"]:
        try:
            seconds = load_seconds(source, target)
        except ValueError:  # the launcher takes no pointer of another device: no word about the link
            seconds = None
        _say(pair=[source, target], load_seconds=seconds)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
