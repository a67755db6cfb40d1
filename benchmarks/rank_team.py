"""Ranks that stay: they build something large once, and measure with it what they are told, one call after another.

A rank that dies says why to the call it died in; the next call starts all ranks anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import ranks
from engine.comm.parallel_state import ParallelState

_END_SECONDS = 20.0
_LOOK_SECONDS = 0.05


class RankTeam:
    """`maker` ("module:callable") is called on each rank as maker(parallel, **settings); `call` calls a method of what
    it made. Nothing starts before the first call. A context manager, at whose end the ranks end."""

    def __init__(self, maker: str, settings: dict[str, Any], tp: int, ep: int, device: str):
        self._maker, self._settings = maker, settings
        self._world = tp, ep, device
        self._ranks: list[subprocess.Popen] = []
        self._directory: tempfile.TemporaryDirectory | None = None
        self._calls = 0

    def __enter__(self) -> RankTeam:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def call(self, method: str, settings: dict[str, Any], seconds: float) -> list[Any]:
        """What the method returned on each rank, in rank order; the first call also waits for the ranks to be made.

        Raises RuntimeError with the end of a rank's output where one ends, or with all ranks' where they take longer
        than `seconds`; all ranks are ended then."""
        deadline = time.monotonic() + seconds
        try:
            if not self._ranks:
                self._start()
            order = json.dumps({"number": self._calls, "method": method, "settings": settings}) + "\n"
            with contextlib.suppress(BrokenPipeError):  # a rank has ended: `_wait` says why
                for rank in self._ranks:
                    rank.stdin.write(order.encode())
                    rank.stdin.flush()
            answers = self._wait(method, deadline)
        except BaseException:
            self._kill()
            raise
        self._calls += 1
        return answers

    def close(self) -> None:
        """Lets the ranks end by themselves, and ends them if they do not."""
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(deadline - time.monotonic(), 0.0))
        self._kill()

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        directory, (tp, ep, device) = Path(self._directory.name), self._world
        settings = {"maker": self._maker, "settings": self._settings, "directory": self._directory.name}
        self._calls = 0
        for rank in range(tp):
            work = "benchmarks.rank_team:follow"
            self._ranks.append(ranks.start(directory, work, settings, rank, tp, ep, device, subprocess.PIPE))

    def _wait(self, method: str, deadline: float) -> list[Any]:
        directory = Path(self._directory.name)
        files = [_answer_file(directory, self._calls, number) for number in range(len(self._ranks))]
        while not all(file.is_file() for file in files):
            ended = [n for n, rank in enumerate(self._ranks) if rank.poll() is not None and not files[n].is_file()]
            if ended:
                code = self._ranks[ended[0]].returncode
                raise RuntimeError(f"{method}: rank {ended[0]} ended ({code}):\n{ranks.tail(directory, ended[0])}")
            if time.monotonic() > deadline:
                tails = "\n".join(ranks.tail(directory, number) for number in range(len(files)))
                raise RuntimeError(f"{method}: not done in time:\n{tails}")
            time.sleep(_LOOK_SECONDS)
        return [json.loads(file.read_text()) for file in files]

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        self._ranks = []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _answer_file(directory: Path, number: int, rank: int) -> Path:
    return directory / f"answer-{number}-{rank}.json"


def follow(parallel: ParallelState, maker: str, settings: dict[str, Any], directory: str) -> None:
    """A rank's side: does what each line of standard input says, until it ends."""
    module, name = maker.split(":")
    made = getattr(importlib.import_module(module), name)(parallel, **settings)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(made, order["method"])(**order["settings"])
        file = _answer_file(Path(directory), order["number"], parallel.rank)
        unfinished = file.with_suffix(".part")
        unfinished.write_text(json.dumps(answer))
        os.replace(unfinished, file)
    made.close()
