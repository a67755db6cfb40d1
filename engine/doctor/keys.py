"""Under which keys the doctor and its ranks meet in the store."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

SETTINGS = "settings"
GO = "go"
AT = "at/{}"  # rank -> number of the probe it is in, -1 before the first
RESULT = "result/{}"  # probe number -> JSON
FAILED = "failed/{}"  # rank -> why it ended
PROBES = "probes"
ENVIRONMENT = "environment"
OVER = "over"
END = "end"
BYE = "bye/{}"  # rank of a doctor process that has seen the end

_WAIT = timedelta(seconds=30)


def world_store(address: str, world: int) -> dist.Store:
    """The part of the store at HOST:PORT that belongs to one world of ranks."""
    host, port = address.rsplit(":", 1)
    return part(dist.TCPStore(host, int(port), is_master=False, timeout=_WAIT), world)


def part(store: dist.Store, world: int) -> dist.Store:
    return dist.PrefixStore(f"turnout/doctor/{world}", store)


def read(store: dist.Store, key: str) -> str | None:
    """The value of a key, None where there is none yet."""
    return store.get(key).decode() if store.check([key]) else None
