"""Keeps what was measured, in a file for each combination of hardware, versions, settings and sizes.

A file that is damaged or of another kind is as good as none, and is replaced in one move.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch

from engine.comm.collectives import gather_json
from engine.comm.dispatcher import DispatchLimits
from engine.comm.parallel_state import ParallelState
from engine.comm.timing import RoundTimes
from engine.log import logger
from engine.version import __version__

SCHEMA = 1
OFF = "off"

Measured = dict[str, dict[int, RoundTimes]]
"""Dispatcher -> rows -> what its rounds take."""


def default_directory() -> Path:
    """`turnout/comm` in the user's cache directory. Raises RuntimeError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turnout" / "comm"


def fingerprint(names: list[str], sizes: list[int], limits: DispatchLimits, parallel: ParallelState) -> dict[str, Any]:
    """Everything that the times depend on, as JSON values; the same on all ranks, each of which calls it."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "torch": torch.__version__,
        "tp": parallel.tp,
        "ep": parallel.ep,
        "limits": asdict(limits) | {"dtype": str(limits.dtype)},
        "dispatchers": names,
        "sizes": sizes,
        "ranks": gather_json(_rank_facts(parallel.device), parallel),
    }


def _rank_facts(device: torch.device) -> dict[str, Any]:
    """This rank's device, whether it reaches its host's other GPUs directly, and what steers its NCCL."""
    facts: dict[str, Any] = {"nccl": {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_")}}
    if device.type != "cuda":
        return facts | {"device": device.type}
    peers = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return facts | {
        "device": torch.cuda.get_device_name(device),
        "nccl_version": list(torch.cuda.nccl.version()),
        "cuda": torch.version.cuda,
        "peer_access": {str(i): torch.cuda.can_device_access_peer(device.index, i) for i in peers},
    }


class ChoiceCache:
    """Rank 0's files. `directory` is one, "off", or None for the user's cache directory."""

    def __init__(self, directory: str | None):
        self._directory: Path | None = None
        try:
            if directory != OFF:
                self._directory = Path(directory) if directory else default_directory()
        except RuntimeError as error:
            logger.warning("dispatchers are measured at every start: %s", error)

    def path(self, key: dict[str, Any]) -> Path | None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return self._directory / f"{name}.json" if self._directory is not None else None

    def load(self, key: dict[str, Any]) -> Measured | None:
        """What was kept for `key`; None where there is nothing that can be used."""
        path = self.path(key)
        if path is None:
            return None
        try:
            return _read(json.loads(path.read_bytes()), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the kept choice in %s is ignored and measured again: %s", path, error)
            return None

    def store(self, key: dict[str, Any], measured: Measured) -> None:
        path = self.path(key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps({"key": key, "seconds": as_json(measured)}, indent=1))
        except OSError as error:
            logger.warning("the choice of dispatchers is not kept, so the next start measures again: %s", error)


def as_json(measured: Measured) -> dict[str, dict[str, list[float]]]:
    return {name: {str(size): [*astuple(one)] for size, one in row.items()} for name, row in measured.items()}


def from_json(seconds: Any, names: list[str], sizes: list[int]) -> Measured:
    """The other way, in the order of `names`. Raises ValueError unless it has some of the names, and all sizes."""
    if not isinstance(seconds, dict) or not set(seconds) <= set(names):
        raise ValueError("its dispatchers are not those asked for")
    return {name: _row(seconds[name], sizes) for name in names if name in seconds}


def _row(row: Any, sizes: list[int]) -> dict[int, RoundTimes]:
    if not isinstance(row, dict) or set(row) != {str(size) for size in sizes}:
        raise ValueError("its sizes are not those asked for")
    return {size: _round_times(row[str(size)]) for size in sizes}


def _round_times(verbs: Any) -> RoundTimes:
    if not isinstance(verbs, list) or len(verbs) != 3 or not all(isinstance(t, float) for t in verbs):
        raise ValueError(f"{verbs!r} is not the time of three rounds")
    times = RoundTimes(*verbs)
    if not (min(verbs) >= 0 and 0 < times.layer < math.inf):
        raise ValueError(f"{verbs!r} is no time")
    return times


def _read(kept: Any, key: dict[str, Any]) -> Measured:
    """Raises ValueError for what this version would not have written."""
    if not isinstance(kept, dict) or kept.get("key") != key:
        raise ValueError("it is of another kind")
    measured = from_json(kept.get("seconds"), key["dispatchers"], key["sizes"])
    if not measured:
        raise ValueError("it is empty")
    return measured


def _replace(path: Path, text: str) -> None:
    """Other engines may read and write the same file meanwhile."""
    handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".new", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
