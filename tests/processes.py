"""Runs of the project's own programs as a user would start them, with everything they start found again by a mark."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHON = [sys.executable]
TORCHRUN = [str(Path(sys.executable).parent / "torchrun")]


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls `condition` until it holds, and returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


class Program:
    """One started command and all its descendants, which inherit a mark in their environment."""

    def __init__(self, command: list[str], directory: Path, **environment: str):
        self._mark = f"TURNOUT_TEST_RUN={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", name: value}
        self._output = directory / f"output-{value}"
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | settings | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def commands(self) -> dict[int, str]:
        """Process id -> command line of everything that still runs."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # gone, or not ours
                continue
        return {pid: command for pid, command in found.items() if command}

    def find(self, pattern: str) -> list[int]:
        return [pid for pid, command in self.commands().items() if re.search(pattern, command)]

    def expect(self, pattern: str, seconds: float = 90) -> re.Match:
        """The first match of `pattern` in the output, waited for."""

        def seen() -> re.Match | None:
            match = re.search(pattern, self.output)
            assert match or self.process.poll() is None, f"ended without {pattern!r}:\n{self.output}"
            return match

        return until(seen, seconds, f"{pattern!r} in {self.output}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ends(self, seconds: float = 20) -> int:
        """The exit code, after checking that every rank is gone within `seconds`. torchrun itself may take longer."""
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        until(lambda: not self.ranks(), seconds * max(load, 1), f"no rank runs: {self.output}")
        until(lambda: not self.commands(), 60, f"no process runs: {self.output}")
        return self.process.wait(20)

    def ranks(self) -> list[int]:
        return [pid for pid, command in self.commands().items() if "torchrun" not in command.split(".py")[0]]

    def kill(self) -> None:
        for pid in self.commands():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@contextmanager
def running(command: list[str], directory: Path, **environment: str) -> Iterator[Program]:
    program = Program(command, directory, **environment)
    try:
        yield program
    finally:
        program.kill()


@contextmanager
def serving(launcher: list[str], directory: Path, *options: str) -> Iterator[tuple[Program, int]]:
    """A server on a free port, up to the moment it says that it serves; yields it and the port."""
    command = [*launcher, "serve.py", "--port", "0", "--device", "cpu", "--num-threads", "1", *options]
    with running(command, directory) as program:
        yield program, int(program.expect(r"serving \S+ on http://127\.0\.0\.1:(\d+)")[1])
