"""Ranks of a measurement that decode as an engine does: rank 0 plans each step, the others do what it says.

What a step guesses depends on clocks, which differ between ranks; so ranks that all ran an engine of their own would
part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from engine.comm.collectives import gather_json
from engine.comm.control import ControlClient, ControlServer
from engine.comm.parallel_state import ParallelState
from engine.comm.step_watch import Patience
from engine.launch import Follower, loopback_store
from engine.model_files import ModelFiles
from engine.replica import Replica

_HOST = "127.0.0.1"
PATIENCE = Patience(step=60.0)


class Led:
    """The lines between ranks of one host, made collectively; `close` is too."""

    def __init__(self, parallel: ParallelState):
        self.parallel = parallel
        store = loopback_store() if parallel.rank == 0 else None
        port = gather_json(store.port if store else None, parallel)[0]
        if store is None:
            self._store = dist.TCPStore(_HOST, port, is_master=False)
            self.control: ControlServer | ControlClient = ControlClient(self._store, parallel.rank, PATIENCE)
        else:
            self._store = store
            self.control = ControlServer(store, parallel.tp, _HOST, patience=PATIENCE)
        self.control.position = lambda: parallel.meter.position
        self.control.end_step()  # of the start

    def run(self, runner: Any, files: ModelFiles, lead: Callable[[ControlServer], Any]) -> Any:
        """What `lead(control)` returned on rank 0, on every rank. `lead` makes a core of `runner` and `control`, steps
        it until nothing is left, and lets the ranks return; the others follow it.

        Raises EngineDeadError where a rank fails meanwhile."""
        if self.parallel.rank == 0:
            result = lead(self.control)
        else:
            result = None
            Follower(files.tokenizer, Replica(runner.config, runner, runner.overlaps), self.control).follow()
        return gather_json(result, self.parallel)[0]

    def close(self) -> None:
        gather_json(None, self.parallel)  # nobody waits for a rank that has gone
        self.control.close()
