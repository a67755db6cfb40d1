"""Processes that load at once, for `python -m engine.bench load`: this module is what each runs, and who speaks to it.

A rank prints one line of JSON when it knows what it will read, then one for each arm that a line on its input names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from engine.bench.load_arms import RankLoad, extents_as_plain, extents_from_plain, quiet
from engine.bench.report import MeasurementError
from engine.config import ConfigError, EngineConfig
from engine.loading.extent_reader import Extent

_ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """The processes, for a `with` block; places: rank of the world that each is."""

    def __init__(self, config: EngineConfig, places: list[int]):
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
        threads = max(1, (os.cpu_count() or 1) // len(places))
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "engine.bench.load_ranks", str(local), str(rank), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
            for local, rank in enumerate(places)
        ]
        for process in self._processes:
            self._say(process, config.to_json())

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self._processes:
            if error[0] is None:
                process.stdin.close()
            else:
                process.kill()
            process.wait()
            process.stdout.close()

    def extents(self) -> list[list[Extent]]:
        """What each rank will read. Raises ConfigError, MeasurementError."""
        return [extents_from_plain(answer["extents"]) for answer in self._answers()]

    def run(self, arm: str, pieces: list[list[Extent]]) -> list[dict[str, Any]]:
        """One `Sample` of each rank, all at once. Raises MeasurementError."""
        for process, own in zip(self._processes, pieces, strict=True):
            self._say(process, json.dumps({"arm": arm, "pieces": extents_as_plain(own)}))
        return self._answers()

    def _say(self, process: subprocess.Popen, line: str) -> None:
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise MeasurementError(f"a rank ended with exit code {process.wait()}; see above.") from None

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            line = process.stdout.readline()
            if not line:
                raise MeasurementError(f"a rank ended with exit code {process.wait()}; see above.")
            answers.append(json.loads(line))
        for answer in answers:
            if "error" in answer:
                raise ConfigError(answer["error"])
        return answers


def main(arguments: list[str]) -> int:
    """arguments: the GPU's number, the rank of the world, threads."""
    local, rank, threads = map(int, arguments)
    quiet()
    torch.set_num_threads(threads)
    config = EngineConfig.from_json(sys.stdin.readline())
    try:
        if config.device == "cuda":
            torch.cuda.set_device(local)
            torch.empty(1, device="cuda")  # a context is no part of a load
        load = RankLoad.of(config, rank)
    except ValueError as error:  # of a checkpoint or of a configuration
        _answer({"error": str(error)})
        return 1
    _answer({"extents": extents_as_plain(load.extents)})
    for line in sys.stdin:
        task = json.loads(line)
        try:
            _answer(load.run(task["arm"], extents_from_plain(task["pieces"])).plain())
        except (ValueError, OSError) as error:
            _answer({"error": f"{task['arm']}: {error}"})
    return 0


def _answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
