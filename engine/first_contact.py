"""The first collective of a process group, which is where a host whose GPUs do not really reach each other hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

MEETING_SECONDS = 60.0
ALL_REDUCE_SECONDS = 20.0
REMEDY = (
    "peer access between GPUs may be redirected by the IOMMU or PCIe ACS: try NCCL_P2P_DISABLE=1, or turn ACS off; "
    "NCCL_DEBUG=INFO shows where it stands"
)


@contextlib.contextmanager
def within(seconds: float, what: str, device: torch.device, fail: Callable[[str], None] | None) -> Iterator[None]:
    """Calls `fail` with a sentence if the block takes longer; the block itself may hang for ever. None: no limit."""
    remedy = f"; {REMEDY}" if device.type == "cuda" else ""
    timer = threading.Timer(seconds, lambda: fail(f"{what} within {seconds:g} s{remedy}."))
    timer.daemon = True
    if fail is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def first_all_reduce(device: torch.device, world_size: int, fail: Callable[[str], None] | None) -> None:
    """Sums 8 bytes over all ranks. Raises RuntimeError if the sum is wrong."""
    with within(ALL_REDUCE_SECONDS, "the ranks did not finish a first all-reduce of 8 bytes", device, fail):
        one = torch.ones(1, dtype=torch.int64, device=device)
        dist.all_reduce(one)
        total = int(one)
    if total != world_size:
        raise RuntimeError(f"the first all-reduce over {world_size} ranks gave {total}; the links lose data.")
