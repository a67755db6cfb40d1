"""Starts or joins the ranks of an engine, and builds this process's part of it.

Under torchrun with enough ranks each process joins; otherwise this process is rank 0 and starts the others as
`python -m engine.worker`. Everything a started rank needs reaches it through rank 0's store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from engine import expert_map, log
from engine.aftermath import Aftermath, end_process_group
from engine.agreement import agree, facts_of
from engine.attention.backend import ATTENTION_BACKENDS
from engine.comm.control import ControlClient, ControlServer
from engine.comm.dispatcher import DISPATCHERS
from engine.comm.parallel_state import ParallelState
from engine.comm.step_watch import Patience
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.errors import EngineDeadError
from engine.first_contact import MEETING_SECONDS, first_all_reduce, within
from engine.loading.display import shown
from engine.loading.progress import STARTING, LoadProgress, meet
from engine.loading.weights import Checkpoint
from engine.model_files import ModelFiles
from engine.model_loading import check_model, open_checkpoint, verify_checksums
from engine.model_runner import ModelRunner
from engine.replica import Replica
from engine.tokenizer import Tokenizer

_CONFIG_KEY = "turnout/config"
_SUMS_KEY = "turnout/sums"
_START_TIMEOUT = timedelta(minutes=10)
_END_SECONDS = 3.0
_REASON_SECONDS = 0.5
_ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Ranks:
    """The process group this process is in, and the processes it started for it.

    must_exit: whether the process has no other purpose, so that it ends if a step hangs that nothing else can end.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    store: dist.Store | None = None
    joined: bool = False
    control: ControlServer | ControlClient | None = None
    children: list[subprocess.Popen] = field(default_factory=list)
    runner: ModelRunner | None = None
    must_exit: bool = False

    def close(self) -> None:
        """Ends the started ranks, by force if they do not end by themselves."""
        if self.control is not None:
            self.control.close()
        deadline = time.monotonic() + _END_SECONDS
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(deadline - time.monotonic(), 0))
        self.kill()
        has_failed = self.control is not None and self.control.failure is not None
        if self.runner is not None and not has_failed:
            self.runner.close()
        elif self.runner is not None:
            self.runner.drop_graphs()  # the dispatchers' own end would wait for the other ranks
        self.runner = None
        if self.world_size > 1:
            end_process_group(has_failed)
        self.store = None

    def lead(self, control: ControlServer) -> None:
        """Rank 0's control is there; a failure that it finds ends everything."""
        self.control = control
        aftermath = Aftermath(self.kill, control.watch.is_in_step, lambda: control.step_thread)
        control.on_verdict = lambda: aftermath.begin(self.must_exit)

    def kill(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdin.close()

    def lost_child(self) -> str | None:
        """Why a started rank is no more, if one has ended."""
        codes = [(rank, child.poll()) for rank, child in enumerate(self.children, 1)]
        return next((f"rank {rank} ended with exit code {c} while it started." for rank, c in codes if c), None)


class Follower:
    """A rank other than 0: does what rank 0 says."""

    def __init__(self, tokenizer: Tokenizer, replica: Replica, control: ControlClient):
        self.tokenizer = tokenizer
        self._replica, self._control = replica, control

    def follow(self) -> list[dict] | None:
        """Works until rank 0 ends its call (returns the call's value) or goes away (returns None).

        Raises EngineDeadError if the engine has failed because of another rank."""
        self._control.is_attending = True
        try:
            return self._follow()
        except (
            RuntimeError
        ) as error:  # perhaps a collective that broke because of another rank: the reason is on its way
            reason = self._control.wait_for_failure(_REASON_SECONDS)
            if reason is not None:
                raise EngineDeadError(reason) from None
            self._report(error)
            raise
        except Exception as error:
            self._report(error)
            raise
        finally:
            self._control.is_attending = False

    def _report(self, error: Exception) -> None:
        self._control.report_failure(f"failed: {type(error).__name__}: {error}")

    @property
    def failure(self) -> str | None:
        return self._control.failure

    def _follow(self) -> list[dict] | None:
        while (message := self._control.receive()) is not None:
            if message["kind"] == "return":
                return message["value"]
            if message["kind"] == "expert_load":
                self._replica.runner.expert_counts()
                digest = None
            elif message["kind"] == "flush":
                self._replica.scheduler.kv_cache.flush()
                digest = None
            else:
                digest = self._replica.step_as_told(message)
            self._control.end_step(digest, self._replica.has_unfinished)
        return None


def start_engine(
    config: EngineConfig,
    must_exit: bool = False,
    progress: LoadProgress | None = None,
    terminal: TextIO | None = None,
) -> tuple[EngineCore | Follower, Ranks]:
    """Builds the engine of `config` in this process; `must_exit` as in `Ranks`. progress: says from then on how far it
    is. terminal: where rank 0 draws a bar of it; else it writes lines to the log.

    Raises ConfigError or CheckpointError for what cannot work, EngineDeadError where a rank fails.
    """
    config, progress = _resolve(config), progress or LoadProgress()
    world_size = _world_size(config)
    files = ModelFiles.read(config)
    checkpoint = _check(config, files, progress, world_size)
    progress.enter(STARTING)
    ranks = _join(config, world_size) if world_size > 1 else _start_ranks(config, must_exit)
    try:
        _follow_load(ranks, progress)
        if ranks.rank:
            return _build(config, files, ranks, checkpoint, progress), ranks
        with shown(progress, terminal):
            return _build(config, files, ranks, checkpoint, progress), ranks
    except BaseException:
        ranks.kill()
        ranks.close()
        raise


def _check(config: EngineConfig, files: ModelFiles, progress: LoadProgress, world_size: int) -> Checkpoint | None:
    """All that can be found wrong before ranks meet. The headers are read here once, and travel on."""
    checkpoint = open_checkpoint(config, files)
    expected = check_model(config, files, checkpoint)
    if expected is not None and os.environ.get("RANK", "0") == "0":
        log.logger.info("preflight: %s", expected)
    if config.verify_checksums:
        local = (os.environ.get(name, default) for name, default in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")))
        place, places = map(int, local) if world_size > 1 else (0, 1)
        verify_checksums(files, place, places, progress)
    return checkpoint


def start_worker(rank: int, world_size: int, address: str) -> tuple[Follower, Ranks]:
    """The other side of `_start_ranks`: this process is one of the ranks that rank 0 started."""
    host, port = address.rsplit(":", 1)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=_START_TIMEOUT)
    ranks = Ranks(rank, world_size, rank, store)
    config = EngineConfig.from_json(store.get(_CONFIG_KEY).decode())
    ranks.control = ControlClient(store, rank, _patience(config))
    progress = LoadProgress()
    _follow_load(ranks, progress)
    return _build(config, ModelFiles.read(config), ranks, None, progress), ranks


def _follow_load(ranks: Ranks, progress: LoadProgress) -> None:
    """Ranks tell each other how far their weights are, and rank 0's watch looks there for one that stands still."""
    control = ranks.control
    progress.join(ranks.rank, ranks.world_size, ranks.store, lambda: control and control.failure)
    if isinstance(control, ControlServer):
        control.loads = progress.polled


def _resolve(config: EngineConfig) -> EngineConfig:
    for name, table in (("moe_comm", DISPATCHERS), ("attention_backend", ATTENTION_BACKENDS)):
        known = ["auto", *table]
        if getattr(config, name) not in known:
            raise ConfigError(f"{name} {getattr(config, name)!r} is not known; use one of {', '.join(known)}.")
    if isinstance(config.expert_map, str):  # what it says is compared between ranks, and reaches started ones
        config = replace(config, expert_map=expert_map.read(config.expert_map))
    return config.resolve(torch.cuda.device_count())


def _world_size(config: EngineConfig) -> int:
    """How many ranks torchrun started, 1 without it."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and world_size != config.tp:
        raise ConfigError(
            f"torchrun started {world_size} ranks, but tp={config.tp}; use --nproc-per-node {config.tp}, or 1 to have "
            "the others started."
        )
    if config.tp > 1 and dist.is_initialized():
        raise ConfigError("this process already has a process group; close the other engine first.")
    _check_gpus(config, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) if world_size > 1 else config.tp)
    return world_size


def _check_gpus(config: EngineConfig, local_ranks: int) -> None:
    available = torch.cuda.device_count()
    if config.device == "cuda" and local_ranks > available:
        raise ConfigError(
            f"{local_ranks} ranks need {local_ranks} GPUs on this host, but it has {available}; lower --tp or use "
            "device='cpu'."
        )


def _join(config: EngineConfig, world_size: int) -> Ranks:
    """torchrun's own rendezvous."""
    store, rank, _ = next(dist.rendezvous("env://", timeout=_START_TIMEOUT))
    lost_agent = _agent_watch()
    if config.verify_checksums:  # a rank with more of the files may be much later; torchrun ends all if one fails
        meet(store, _SUMS_KEY, rank, world_size, lost_agent)
    ranks = Ranks(rank, world_size, int(os.environ["LOCAL_RANK"]), store, joined=True, must_exit=True)
    if rank == 0:
        ranks.lead(
            ControlServer(
                store, world_size, os.environ["MASTER_ADDR"], patience=_patience(config), lost_parent=lost_agent
            )
        )
    else:
        ranks.control = ControlClient(store, rank, _patience(config), lost_agent)
    return ranks


def _agent_watch() -> Callable[[], str | None]:
    """Says when the torchrun that started this rank is gone, killed perhaps: nobody would end or restart it then."""
    agent = os.getppid()
    return lambda: None if os.getppid() == agent else "has lost the torchrun that started it"


def _start_ranks(config: EngineConfig, must_exit: bool) -> Ranks:
    if config.tp == 1:
        return Ranks()
    store = loopback_store()
    store.set(_CONFIG_KEY, config.to_json())
    ranks = Ranks(0, config.tp, 0, store, must_exit=must_exit)
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    for rank in range(1, config.tp):
        command = [sys.executable, "-m", "engine.worker", "--rank", str(rank), "--world-size", str(config.tp)]
        command += ["--store", f"127.0.0.1:{store.port}", "--log-level", log.level()]
        # Its own session: Ctrl-C in a terminal reaches rank 0 alone, which then ends the others in order. The pipe
        # stays open as long as rank 0 lives.
        ranks.children.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, start_new_session=True, env=os.environ | {"PYTHONPATH": path}
            )
        )
    try:
        ranks.lead(ControlServer(store, config.tp, "127.0.0.1", ranks.lost_child, _patience(config)))
    except BaseException:
        ranks.kill()
        raise
    return ranks


def _patience(config: EngineConfig) -> Patience:
    """Always less than the process group has, which cannot say who it waits for."""
    most = 0.8 * config.comm_timeout
    return Patience(step=min(config.step_timeout, most), start=most)


def loopback_store() -> dist.TCPStore:
    """A store on a free port of this host alone; left to itself it would listen on every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_START_TIMEOUT,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _build(
    config: EngineConfig, files: ModelFiles, ranks: Ranks, checkpoint: Checkpoint | None, progress: LoadProgress
) -> EngineCore | Follower:
    try:
        _agree(config, files, ranks)
        parallel = _parallel_state(config, ranks)
        if ranks.control is not None:
            ranks.control.position = lambda: parallel.meter.position + progress.num_meetings
        ranks.runner = runner = ModelRunner(config, files, parallel, checkpoint, progress)
        if ranks.control is not None:
            ranks.control.end_step()
    except Exception as error:
        _blame(ranks, error)
        raise
    if ranks.rank == 0:
        return EngineCore(config, files, runner, ranks.control, ranks.close)
    return Follower(files.tokenizer, Replica(config, runner, runner.overlaps), ranks.control)


def _agree(config: EngineConfig, files: ModelFiles, ranks: Ranks) -> None:
    """Raises ConfigError on every rank if one of them is not like rank 0."""
    if ranks.control is not None:
        draft = None if files.draft is None else files.draft.directory
        facts = facts_of(config, files.directory, ranks.local_rank, draft)
        agree(facts, ranks.store, ranks.rank, ranks.world_size, lambda: ranks.control.failure)


def _blame(ranks: Ranks, error: Exception) -> None:
    """A rank that cannot start says why; rank 0 repeats the first reason rather than the broken collective."""
    if isinstance(ranks.control, ControlClient):
        ranks.control.report_failure(f"failed to start: {error}")
    elif isinstance(ranks.control, ControlServer) and not isinstance(error, ValueError):
        reason = ranks.control.wait_for_failure(1.0)
        if reason is not None:
            raise EngineDeadError(reason) from error


def _parallel_state(config: EngineConfig, ranks: Ranks) -> ParallelState:
    device = torch.device("cpu")
    if config.device == "cuda":
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    else:
        _set_threads(config, ranks)
    if ranks.world_size > 1:
        _meet(device, config, ranks)
    return ParallelState(ranks.rank, device=device, **config.placement())


def _meet(device: torch.device, config: EngineConfig, ranks: Ranks) -> None:
    """Makes the process group and tries it once; rank 0 sees to it that this ends."""
    fail = ranks.control.fail if isinstance(ranks.control, ControlServer) else None
    with within(MEETING_SECONDS, "the ranks did not make a process group", device, fail):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("turnout/pg", ranks.store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=config.comm_timeout),
            device_id=device if device.type == "cuda" else None,
        )
    first_all_reduce(device, ranks.world_size, fail)


def _set_threads(config: EngineConfig, ranks: Ranks) -> None:
    """Ranks on one CPU share its cores; more threads than cores would wait for each other."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    elif ranks.world_size > 1:
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if ranks.joined else ranks.world_size
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // here))
