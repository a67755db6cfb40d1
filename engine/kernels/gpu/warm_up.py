"""Compiles the kernels of a step before its first run, many at a time, into Triton's cache on disk.

`recorded_launches` notes what a dry run would compile instead of compiling it; `compile_all` hands that to worker
processes (`python -m engine.kernels.gpu.warm_up`), which need no GPU. The launches that follow find the binaries on
disk, as those of a later start do. Triton's own description of a launch is what travels, so nothing here knows shapes.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver

MAX_WORKERS = 16
_DONE = "done"
_ALLOCATIONS = [getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")]
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Launch:
    """A binary to be: the kernel's place, Triton's JSON of its specialisation, the GPU's architecture."""

    module: str
    name: str
    specialization: str
    arch: int

    def source(self) -> ASTSource:
        kernel = getattr(importlib.import_module(self.module), self.name)
        data = json.loads(self.specialization)
        constants = {tuple(k): _constant(v) for k, v in zip(data["constant_keys"], data["constant_vals"], strict=True)}
        alignment = {tuple(k): v for k, v in zip(data["attrs_keys"], data["attrs_vals"], strict=True)}
        signature = {argument: _tuples(kind) for argument, kind in data["signature"].items()}
        kind = GluonASTSource if kernel.is_gluon() else ASTSource
        return kind(kernel, signature, constants, alignment)

    def compile(self, source: ASTSource | None = None) -> CompiledKernel:
        """From disk if it is there."""
        options = json.loads(self.specialization)["options"]
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
        return compile(source or self.source(), target=GPUTarget("cuda", self.arch, 32), options=options)

    def is_on_disk(self) -> bool:
        class Missing(Exception):
            pass

        def stop(*_):
            raise Missing

        source = self.source()
        source.make_ir = stop  # what comes after the look on disk
        try:
            self.compile(source)
        except Missing:
            return False
        return True


def _constant(value):
    """A constant out of JSON, as Triton writes it there."""
    if isinstance(value, dict) and "constexpr" in value:
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if tl.dtype.is_dtype(value) else value


def _tuples(kind):
    return tuple(map(_tuples, kind)) if isinstance(kind, list) else kind


class _ZeroedMemory(TorchDispatchMode):
    """Memory that a kernel would have filled holds zeros, which are valid ids and lengths for what reads it next."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the mode imports torch.compile, which takes seconds and is not in use here

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _ALLOCATIONS:
            result.zero_()
        return result


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Within it kernels that this process has not compiled are noted and not run; new memory is zero.

    For dry runs of steps, whose results mean nothing."""
    found: dict[str, Launch] = {}
    arch = driver.active.get_current_target().arch

    def note(*, key, fn, compile, **_) -> bool:
        specialization = compile["specialization_data"]
        found[f"{fn.module}.{fn.name} {key}"] = Launch(fn.module, fn.name, specialization, arch)
        return True  # neither compiled nor launched

    launches: list[Launch] = []
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        with _ZeroedMemory():
            yield launches
    finally:
        knobs.runtime.jit_cache_hook = before
        launches += found.values()


def compile_all(launches: list[Launch], max_workers: int = MAX_WORKERS) -> tuple[int, list[str]]:
    """Compiles what is not on disk yet. Returns how many that were, and what went wrong with some of them."""
    missing = deque(launch for launch in launches if not launch.is_on_disk())
    count, failures = len(missing), []
    num_workers = min(count, max_workers, len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=_feed_worker, args=(missing, failures)) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count, failures


def _feed_worker(missing: deque[Launch], failures: list[str]) -> None:
    """One worker's life: a launch at a time until none is left."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "engine.kernels.gpu.warm_up"]
    command += ["--launchers"] if torch.cuda.is_available() else []
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        with subprocess.Popen(command, env=environment, **pipes) as worker:
            while missing:
                worker.stdin.write(json.dumps(asdict(missing.popleft())) + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline().strip()
                if answer != _DONE:
                    failures.append(answer or "a compiling process ended without a word")
    except IndexError:
        return  # another thread took the last one
    except OSError as error:
        failures.append(f"a compiling process could not be used: {error}")


def main() -> None:
    with_launchers = "--launchers" in sys.argv
    for line in sys.stdin:
        launch = Launch(**json.loads(line))
        try:
            kernel = launch.compile()
            if with_launchers:  # C code that Triton builds for each signature
                CudaLauncher(kernel.src, kernel.metadata)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{launch.module}.{launch.name}: {words}", flush=True)
        else:
            print(_DONE, flush=True)


if __name__ == "__main__":
    main()
