"""Makes one rank fail in a chosen step, in any program that starts an engine: a hook that Python runs as it starts."""

from __future__ import annotations

import os
from pathlib import Path

FAULTS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "loop": "while True: pass",
    "raise": "raise ValueError('made to fail')",
    "collective": "torch.distributed.all_reduce(torch.zeros(1, device=replica.runner.parallel.device))",
    "disagree": "result[1].token_ids[:] = [[t + 1 for t in ids] for ids in result[1].token_ids]",
}
"""What the rank does at the end of its step, by name."""

_HOOK = '''
import importlib.util, os, signal, sys, time

def note():
    with open({note!r}, "w") as file:
        file.write(str(time.time()))

class Hook:
    """Patches the engine when it is imported, in whichever process that is."""

    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
'''
_IN_STEP = """
def patch(module):
    import torch
    step, calls = module.Replica.step, [0]
    def faulty(replica, *plan):
        result = step(replica, *plan)
        calls[0] += 1
        if replica.runner.parallel.rank == {rank} and calls[0] == {step}:
            note()
            {fault}
        return result
    module.Replica.step = faulty
"""
_AT_START = """
def patch(module):
    init = module.ModelRunner.__init__
    def faulty(runner, config, files, parallel, *rest):
        if parallel.rank == {rank}:
            note()
            {fault}
        init(runner, config, files, parallel, *rest)
    module.ModelRunner.__init__ = faulty
"""


def moment_file(directory: Path) -> Path:
    """Where the fault writes its time, in seconds since the epoch, as it happens."""
    return directory / "fault-moment"


def python_path(directory: Path, fault: str, rank: int, step: int) -> str:
    """A PYTHONPATH whose programs have the fault; `step` counts the rank's steps from 1, 0 is the start."""
    module, note = "engine.replica" if step else "engine.model_runner", str(moment_file(directory))
    hook = _HOOK.format(module=module, note=note)
    body = (_IN_STEP if step else _AT_START).format(rank=rank, step=step, fault=FAULTS[fault])
    folder = directory / "faulty"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(hook + body)
    root = Path(__file__).resolve().parent.parent
    return os.pathsep.join([str(folder), str(root)])
