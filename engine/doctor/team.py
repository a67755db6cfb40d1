"""The processes of a measurement: worlds of ranks that are started, watched and ended, so that none can hang the whole.

A doctor process starts ranks of its own and takes part in no collective itself. Without torchrun there is one, which
starts all ranks; under torchrun each starts the one of its place, and the first leads. A rank that dies or is stuck is
named, its world is ended by force, and the probes that are left get a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engine.doctor.keys import AT, BYE, END, ENVIRONMENT, FAILED, GO, OVER, PROBES, RESULT, SETTINGS, part, read
from engine.doctor.settings import Settings

_ROOT = Path(__file__).resolve().parent.parent.parent
_TICK_SECONDS = 0.02
_FAREWELL_SECONDS = 5.0
_NOT_STARTED = -2
_AHEAD = 3  # starting takes longer than measuring
START_SECONDS = 45.0
PROBE_SECONDS = 30.0


@dataclass(frozen=True)
class World:
    """Probes for one set of ranks, all run under the same additions to the environment."""

    probes: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    probe_seconds: float = PROBE_SECONDS
    start_seconds: float = START_SECONDS

    @property
    def label(self) -> str:
        return " ".join(f"{name}={value}" for name, value in sorted(self.environment.items()))


@dataclass(frozen=True)
class Outcome:
    """Of one probe: its value, or why there is none. `ended_world`: the ranks had to be ended."""

    value: Any = None
    failed: str | None = None
    ended_world: bool = False


class _Rank:
    """One started process, and what it writes to stderr."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, closed in `end`
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # stays open as long as this process lives
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
            env=environment,
        )

    def how_it_ended(self) -> str | None:
        """In words, with the last line it wrote; None while it runs or where all went well."""
        code = self.process.poll()
        if not code:
            return None
        if code < 0:
            return f"was killed by signal {-code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with exit code {code}" + (f" ({lines[-1]})" if lines else "")

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._errors.close()


class Supervisor:
    """Starts and ends this process's ranks, world by world."""

    def __init__(self, store: dist.Store, address: str, ranks: Sequence[int], settings: Settings):
        self.store, self.address, self.ranks, self.settings = store, address, list(ranks), settings
        self._running: dict[int, dict[int, _Rank]] = {}

    def start(self, index: int, world: World) -> None:
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | world.environment | {"PYTHONPATH": path}
        self._running[index] = {rank: _Rank(self._command(index, rank, world), environment) for rank in self.ranks}

    def _command(self, index: int, rank: int, world: World) -> list[str]:
        has_all = len(self.ranks) == self.settings.tp
        place = rank if has_all else int(os.environ["LOCAL_RANK"])
        command = [sys.executable, "-m", "engine.doctor.rank", "--rank", str(rank), "--local-rank", str(place)]
        return [*command, "--world", str(index), "--store", self.address, "--probes", json.dumps(world.probes)]

    def report_deaths(self) -> None:
        """Says in the store which ranks have ended by something other than a reason of their own."""
        for index, ranks in self._running.items():
            for rank, one in ranks.items():
                how = one.how_it_ended()
                if how is not None and read(part(self.store, index), FAILED.format(rank)) is None:
                    part(self.store, index).set(FAILED.format(rank), how)

    def end(self, index: int) -> None:
        for one in self._running.pop(index, {}).values():
            one.end()

    def end_all(self) -> None:
        for index in list(self._running):
            self.end(index)


def follow(supervisor: Supervisor, deadline: float) -> int:
    """Does as the leader says until it says the end; returns the exit code."""
    index = 0
    try:
        while time.monotonic() < deadline + _FAREWELL_SECONDS:
            end = read(part(supervisor.store, -1), END)
            if end is not None:
                part(supervisor.store, -1).set(BYE.format(supervisor.ranks[0]), "")
                return int(end)
            index += _follow_world(supervisor, index)
            supervisor.report_deaths()
            for old in range(index):
                if read(part(supervisor.store, old), OVER) is not None:
                    supervisor.end(old)
            time.sleep(_TICK_SECONDS)
        return 1
    finally:
        supervisor.end_all()


def _follow_world(supervisor: Supervisor, index: int) -> int:
    """Starts the next world where the leader has described it; returns how many it started."""
    store = part(supervisor.store, index)
    probes = read(store, PROBES)
    if probes is None:
        return 0
    supervisor.start(index, World(tuple(json.loads(probes)), json.loads(store.get(ENVIRONMENT).decode())))
    return 1


class Leader:
    """Runs worlds one after another; the ranks of the next ones start while one measures."""

    def __init__(self, supervisor: Supervisor, deadline: float):
        self.supervisor, self.deadline = supervisor, deadline
        self._store, self._settings = supervisor.store, supervisor.settings
        self._count = 0

    def run(self, worlds: Sequence[World], meanwhile: Callable[[], None] = lambda: None) -> dict[str, Outcome]:
        """The outcome of every probe, by "LABEL: PROBE" (the probe alone without a label).

        `meanwhile` is called once the first ranks have been started, before they measure.
        """
        waiting, outcomes = deque(worlds), {}
        started = deque(self._prepare(waiting.popleft()) for _ in range(min(_AHEAD, len(waiting))))
        meanwhile()
        while started:
            index, world = started.popleft()
            if waiting:
                started.append(self._prepare(waiting.popleft()))
            part(self._store, index).set(GO, "")
            left = self._measure(index, world, outcomes)
            part(self._store, index).set(OVER, "")
            self.supervisor.end(index)
            if left:
                started.appendleft(self._prepare(replace(world, probes=left)))
        return outcomes

    def _prepare(self, world: World) -> tuple[int, World]:
        """Describes a world and starts its ranks, which wait for their turn."""
        index = self._count
        self._count += 1
        store = part(self._store, index)
        store.set(SETTINGS, self._settings.to_json())
        store.set(ENVIRONMENT, json.dumps(world.environment))
        store.set(PROBES, json.dumps(world.probes))
        self.supervisor.start(index, world)
        return index, world

    def _measure(self, index: int, world: World, outcomes: dict[str, Outcome]) -> tuple[str, ...]:
        """Collects the outcomes of one world; returns the probes that are left to be tried with new ranks."""
        if time.monotonic() >= self.deadline:
            used_up = Outcome(failed=f"not tried: the {self._settings.seconds:g} s of the run were used up")
            outcomes |= {_key(world, name): used_up for name in world.probes}
            return ()
        for number, name in enumerate(world.probes):
            outcome = self._wait(index, number, world.start_seconds if number == 0 else world.probe_seconds)
            outcomes[_key(world, name)] = outcome
            if outcome.ended_world:
                left = world.probes[number + 1 :]
                if number and time.monotonic() < self.deadline:
                    return left
                for other in left:
                    outcomes[_key(world, other)] = Outcome(failed=f"not tried: {outcome.failed}")
                return ()
        return ()

    def _wait(self, index: int, number: int, limit: float) -> Outcome:
        """The outcome of a world's probe, waited for until `limit` seconds or the deadline have passed."""
        store = part(self._store, index)
        end = min(time.monotonic() + limit, self.deadline)
        while True:
            self.supervisor.report_deaths()
            result = read(store, RESULT.format(number))
            if result is not None:
                return Outcome(**json.loads(result))
            reason = self._lost_rank(store) or self._stuck(store, number, limit, end)
            if reason is not None:
                return Outcome(failed=reason, ended_world=True)
            time.sleep(_TICK_SECONDS)

    def _lost_rank(self, store: dist.Store) -> str | None:
        """The ranks that ended, the ones that died first: others then fail for want of them."""
        reasons = {rank: read(store, FAILED.format(rank)) for rank in range(self._settings.tp)}
        reasons = {rank: reason for rank, reason in reasons.items() if reason is not None}
        killed = next((rank for rank, reason in reasons.items() if "signal" in reason), None)
        rank = killed if killed is not None else min(reasons, default=None)
        return None if rank is None else f"rank {rank}: {reasons[rank]}"

    def _stuck(self, store: dist.Store, number: int, limit: float, end: float) -> str | None:
        if time.monotonic() < end:
            return None
        at = {rank: read(store, AT.format(rank)) for rank in range(self._settings.tp)}
        places = {rank: _NOT_STARTED if where is None else int(where) for rank, where in at.items()}
        late = [str(rank) for rank, place in places.items() if place == min(places.values()) and place < number]
        seconds = f"within {limit:g} s" if end < self.deadline else f"in the {self._settings.seconds:g} s of the run"
        if late:
            return f"{'rank' if len(late) == 1 else 'ranks'} {', '.join(late)} did not get there {seconds}"
        return f"all ranks were in it and none finished {seconds}"

    def farewell(self, code: int) -> None:
        """Tells the other doctor processes the end, and gives them a moment to see it before the store goes."""
        store, own = part(self._store, -1), set(self.supervisor.ranks)
        store.set(END, str(code))
        others = [] if len(own) == self._settings.tp else [r for r in range(self._settings.tp) if r not in own]
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if read(store, BYE.format(rank)) is None]
            time.sleep(_TICK_SECONDS)


def _key(world: World, probe: str) -> str:
    return f"{world.label}: {probe}" if world.label else probe
