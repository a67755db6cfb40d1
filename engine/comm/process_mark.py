"""Which process of which host a rank is, so that a rank that stands still can be ended by another one beside it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def own_mark() -> list[str | int]:
    """[boot of the host, process-id namespace, process id, its start]: names one process and none that comes later."""
    return [*_place(), os.getpid(), _started(os.getpid()) or 0]


def kill_if_here(mark: list[str | int] | None) -> bool:
    """Kills the process of `mark` if it is another one of this host and still runs; also a stopped one."""
    if not mark or mark[2] == os.getpid() or list(mark[:2]) != _place() or mark[3] != _started(int(mark[2])):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(mark[2]), signal.SIGKILL)
    return True


def _place() -> list[str]:
    return [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except OSError:
        return None
