"""A disk that stands still: programs started with this PYTHONPATH wait in their reads until a file is there."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import ROOT

_HOOK = """
import hashlib, os, sys, time

def wait():
    while not os.path.exists({gate!r}):
        time.sleep(0.01)

preadv = os.preadv
stands_still = {option!r} in " ".join(sys.argv)

def slow_preadv(*arguments):
    reader = sys._getframe(1).f_locals
    if stands_still and reader["job"].span is not reader["self"]._spans[0]:
        wait()
    return preadv(*arguments)

os.preadv = slow_preadv
sha256 = hashlib.sha256

class SlowSum:
    def __init__(self, *arguments, **options):
        self._sum = sha256(*arguments, **options)

    def update(self, data):
        if len(data) >= 2**16:
            open({gate!r} + "-sums", "w").close()
            wait()
        self._sum.update(data)

    def __getattr__(self, name):
        return getattr(self._sum, name)

hashlib.sha256 = SlowSum
"""


class SlowDisk:
    """In each program a reader's first span of weights comes at once, others and checksums after `open`. rank: one that
    rank 0 starts, alone in this where it is given."""

    def __init__(self, directory: Path, rank: int | None = None):
        self._gate = directory / "disk-moves"
        folder = directory / "slow-disk"
        folder.mkdir()
        option = "" if rank is None else f"--rank {rank} "
        (folder / "sitecustomize.py").write_text(_HOOK.format(gate=str(self._gate), option=option))
        self.python_path = os.pathsep.join([str(folder), str(ROOT)])

    def open(self) -> None:
        self._gate.touch()

    @property
    def sums_have_begun(self) -> bool:
        return self._gate.with_name(self._gate.name + "-sums").exists()
