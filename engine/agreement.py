"""What all ranks must have in common before any weight is read: settings, checkpoint, versions, kind of device."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.config import ConfigError, EngineConfig
from engine.errors import EngineDeadError
from engine.version import __version__

_FACTS_KEY = "turnout/facts"
_RESULT_KEY = "turnout/agreement"
_POLL_SECONDS = 0.01
_SMALL_FILES = ("*.json", "*.jinja", "tiktoken.model")
_OF_THE_HOST = ("SOCKET_IFNAME", "IB_HCA", "HOSTID", "TOPO_FILE", "DEBUG", "DEBUG_FILE", "DEBUG_SUBSYS")
_LONGEST_SHOWN = 200
_LENGTH = struct.Struct("<Q")


def facts_of(config: EngineConfig, directory: Path, local_rank: int, draft: Path | None = None) -> dict[str, Any]:
    """What this rank has, as JSON: settings, NCCL's settings, checkpoint (a digest a file), versions, device."""
    is_gpu = config.device == "cuda"
    versions = {"turnout": __version__, "torch": torch.__version__, "triton": _version("triton")}
    if is_gpu:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "settings": _plain(config),
        "environment": {k: v for k, v in os.environ.items() if _matters(k)},
        "directory": str(directory),
        "checkpoint": checkpoint_digests(directory)
        | {f"draft's {name}": digest for name, digest in (checkpoint_digests(draft) if draft else {}).items()},
        "versions": versions,
        "device": torch.cuda.get_device_name(local_rank) if is_gpu else "cpu",
    }


def checkpoint_digests(directory: Path) -> dict[str, str]:
    """File name -> digest of the small files' text, and of the size and header of each file of weights."""
    small = {path for pattern in _SMALL_FILES for path in directory.glob(pattern)}
    digests = {path.name: _digest(path.read_bytes()) for path in small}
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            head = file.read(_LENGTH.size)
            size = path.stat().st_size
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            digests[path.name] = _digest(b"%d %b" % (size, head) + file.read(min(length, size)))
    return digests


def agree(facts: dict[str, Any], store: dist.Store, rank: int, world_size: int, failure: Callable[[], str | None]):
    """Raises ConfigError on every rank if one differs from rank 0, EngineDeadError on rank 0 once `failure` says why
    one will not answer."""
    if rank:
        store.set(f"{_FACTS_KEY}/{rank}", json.dumps(facts))
    else:
        store.set(_RESULT_KEY, _first_difference(facts, store, world_size, failure))
    found = store.get(_RESULT_KEY).decode()
    if found:
        raise ConfigError(found)


def _first_difference(
    facts: dict[str, Any], store: dist.Store, world_size: int, failure: Callable[[], str | None]
) -> str:
    for rank in range(1, world_size):
        key = f"{_FACTS_KEY}/{rank}"
        while not store.check([key]):
            if (reason := failure()) is not None:
                raise EngineDeadError(reason)
            time.sleep(_POLL_SECONDS)
        if found := difference(json.loads(store.get(key)), facts, rank):
            return found
    return ""


def difference(theirs: dict[str, Any], ours: dict[str, Any], rank: int) -> str:
    """In one sentence, or ""; `ours` are rank 0's facts."""
    if found := _settings_difference(theirs["settings"], ours["settings"], rank):
        return found
    for name in sorted(ours["environment"] | theirs["environment"]):
        value, other = ours["environment"].get(name), theirs["environment"].get(name)
        if other != value:
            return f"rank {rank} has {_setting(name, other)}, rank 0 {_setting(name, value)}; give all ranks the same."
    for name in sorted(ours["versions"] | theirs["versions"]):
        value, other = ours["versions"].get(name), theirs["versions"].get(name)
        if other != value:
            return f"rank {rank} has {name} {other}, rank 0 {value}; install the same version everywhere."
    if theirs["device"] != ours["device"]:
        return f"rank {rank} runs on {theirs['device']}, rank 0 on {ours['device']}; use GPUs of one kind."
    return _checkpoint_difference(theirs, ours, rank)


def settings_difference(theirs: EngineConfig, ours: EngineConfig, rank: int) -> str:
    return _settings_difference(_plain(theirs), _plain(ours), rank)


def _plain(config: EngineConfig) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config)))


def _settings_difference(theirs: dict[str, Any], ours: dict[str, Any], rank: int) -> str:
    for name, value in ours.items():
        other = theirs.get(name)
        if other != value:
            other, value = _shown(other), _shown(value)
            return f"rank {rank} was started with {name}={other}, rank 0 with {value}; give all ranks the same."
    return ""


def _checkpoint_difference(theirs: dict[str, Any], ours: dict[str, Any], rank: int) -> str:
    place = f"rank {rank} has another checkpoint in {theirs['directory']} than rank 0"
    for name in sorted(ours["checkpoint"] | theirs["checkpoint"]):
        value, other = ours["checkpoint"].get(name), theirs["checkpoint"].get(name)
        if other != value:
            how = "is missing there" if other is None else "is missing on rank 0" if value is None else "differs"
            return f"{place}: {name} {how}; copy the same files to every host."
    return ""


def _matters(name: str) -> bool:
    """Ranks with other NCCL settings may choose other algorithms for the same sum, and wait for each other."""
    return name.startswith("NCCL_") and name.removeprefix("NCCL_") not in _OF_THE_HOST


def _setting(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name}={value}"


def _shown(value: Any) -> str:
    """A setting for a message of one line; a long one by its digest."""
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"sha256:{_digest(text.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
