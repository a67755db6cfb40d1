"""Joins or starts the ranks and measures with them; what the doctor and `engine.bench comm` have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from engine.config import ConfigError
from engine.doctor.settings import Settings
from engine.doctor.team import Leader, Outcome, Supervisor, World, follow
from engine.launch import loopback_store

_RENDEZVOUS = timedelta(seconds=60)


def torchrun_ranks() -> int:
    """How many processes torchrun started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks(settings: Settings) -> int:
    """How many of the ranks are on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", settings.tp)) if torchrun_ranks() > 1 else settings.tp


@contextmanager
def supervised(settings: Settings) -> Iterator[Supervisor]:
    """This process's supervisor. Raises ConfigError where torchrun started another number of processes than ranks."""
    size = torchrun_ranks()
    if size > 1 and size != settings.tp:
        raise ConfigError(f"torchrun started {size} processes, but --tp is {settings.tp}; make them equal.")
    supervisor = _under_torchrun(settings) if size > 1 else _alone(settings)
    try:
        yield supervisor
    finally:
        supervisor.end_all()


def _alone(settings: Settings) -> Supervisor:
    store = loopback_store()
    return Supervisor(store, f"127.0.0.1:{store.port}", range(settings.tp), settings)


def _under_torchrun(settings: Settings) -> Supervisor:
    """torchrun's agent holds the store; without an agent the first rank does."""
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=_RENDEZVOUS)
    return Supervisor(store, f"{host}:{port}", [rank], settings)


def examine(
    settings: Settings,
    worlds: Sequence[World],
    conclude: Callable[[dict[str, Outcome]], int],
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Runs `worlds` and, on the process that leads, hands their outcomes to `conclude`; returns its exit code on all.

    The whole takes at most `settings.seconds` and a little for ending it.
    """
    deadline = time.monotonic() + settings.seconds
    with supervised(settings) as supervisor:
        if supervisor.ranks[0] != 0:
            return follow(supervisor, deadline)
        leader, code = Leader(supervisor, deadline), 1
        try:
            code = conclude(leader.run(worlds, meanwhile))
        finally:
            leader.farewell(code)
        return code
