"""Makes one rank of a small engine fail, in every way and every kind of start, and measures how long all take to end.

    python benchmarks/drills.py                      # 2 GPUs over NCCL; --device cpu for a dry run over gloo
    python benchmarks/drills.py --faults stop loop --starts llm torchrun --json drills.json

Each drill is a program of its own, watched from outside: `llm` starts its other rank itself, `torchrun` has both
started, `serve` is the HTTP server (left out where fastapi is not installed). Printed are the seconds from the fault
until the caller learns of it and until the last process is gone, the exit code and the reason. Exit code 1 if a drill
takes longer than `--limit`, leaves a process, or gives no reason that names the rank.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.fault_injection import FAULTS, moment_file, python_path

ROOT = Path(__file__).resolve().parent.parent
STARTS = ("llm", "torchrun", "serve")
STEP = 40
PATIENCE_SECONDS = 240.0
REASON = re.compile(r"(?:EngineDeadError: |ERROR \[rank \d\] )(ranks? \d[^\n]* [^\n]*)")
SCRIPT = """
import json, os, sys, time
from engine import LLM, SamplingParams, log
log.setup("error", int(os.environ.get("RANK", "0")))
settings, moment = json.loads(sys.argv[1])
llm = LLM(**settings)
params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
try:
    while True:
        llm.generate(["The"] * 4, params)
except RuntimeError as error:
    os.write(1, f"LEARNED {time.time()}\\n{type(error).__name__}: {error}\\n".encode())
    sys.exit(1)
"""


@dataclass(frozen=True)
class Outcome:
    """learned: seconds from the fault until the caller knows, None if no caller was left; ended: until all are gone."""

    start: str
    fault: str
    rank: int
    learned: float | None
    ended: float
    code: int | None
    left: int
    reason: str | None

    def holds(self, limit: float) -> bool:
        named = self.reason is not None and re.search(rf"\branks? (\d, )*{self.rank}\b", self.reason) is not None
        return named and self.ended <= limit and self.left == 0 and self.code not in (0, None)


class Run:
    """One drill's program and all that it starts, found again by a mark in their environment."""

    def __init__(self, command: list[str], path: str, directory: Path):
        self._mark = f"TURNOUT_DRILL={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self._log = directory / "output"
        environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", name: value}
        with open(self._log, "ab") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def left(self) -> list[int]:
        """Process ids that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or another user's
                continue
            if marked and (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        return found

    def wait(self, condition, seconds: float) -> float | None:
        """The time at which `condition` held, None if it did not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return time.time()
            self.process.poll()
            time.sleep(0.02)
        return None

    def code(self) -> int | None:
        """The program's exit code, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(5)

    def kill(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def drill(start: str, fault: str, rank: int, arguments: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run = Run(_command(start, directory, arguments), python_path(directory, fault, rank, STEP), directory)
        try:
            return _watch(run, start, fault, rank, directory)
        finally:
            run.kill()


def _watch(run: Run, start: str, fault: str, rank: int, directory: Path) -> Outcome:
    moment = moment_file(directory)
    if start == "serve":
        _ask_for_much(run)
    if run.wait(lambda: (moment.exists() and moment.read_text()) or run.process.poll() is not None, 600) is None:
        raise SystemExit(f"the fault did not come about:\n{run.output}")
    if not moment.exists():
        raise SystemExit(f"the program ended before the fault:\n{run.output}")
    began = float(moment.read_text())
    ended = run.wait(lambda: not run.left(), PATIENCE_SECONDS)
    said = re.search(r"LEARNED ([\d.]+)", run.output)
    reason = REASON.search(run.output)
    return Outcome(
        start,
        fault,
        rank,
        round(float(said[1]) - began, 1) if said else None,
        round((ended or time.time()) - began, 1),
        run.code(),
        len(run.left()),
        reason and reason[1],
    )


def _command(start: str, directory: Path, arguments: argparse.Namespace) -> list[str]:
    threads = 1 if arguments.device == "cpu" else None
    settings = {"tp": 2, "ep": 2, "device": arguments.device, "num_threads": threads}
    settings |= {"step_timeout": arguments.step_timeout}
    if arguments.moe_comm is not None:
        settings["moe_comm"] = arguments.moe_comm
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if start == "serve":
        options = [f"--{k.replace('_', '-')}={v}" for k, v in settings.items() if v is not None]
        return [sys.executable, "serve.py", "--port", "0", *options]
    script = directory / "script.py"
    script.write_text(SCRIPT)
    launcher = torchrun if start == "torchrun" else [sys.executable]
    return [*launcher, str(script), json.dumps([settings, str(moment_file(directory))])]


def _ask_for_much(run: Run) -> None:
    """A stream that is read in a process of its own, so that what it learns and when is in the output."""
    served = re.compile(r"serving (\S+) on (http://\S+)")
    if run.wait(lambda: served.search(run.output) or run.process.poll() is not None, 600) is None:
        raise SystemExit(f"the server does not serve:\n{run.output}")
    model, url = served.search(run.output).groups()
    body = {"model": model, "prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    reader = os.fork()
    if reader == 0:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
                answer.read()
        except OSError:
            pass
        with open(run._log, "a") as log:
            log.write(f"LEARNED {time.time()}\n")
        os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--faults", nargs="+", default=["kill", "stop", "loop", "raise", "disagree"], choices=FAULTS)
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="ranks that fail, each in its turn")
    parser.add_argument("--moe-comm", help="dispatcher (default: the engine's choice)")
    parser.add_argument("--step-timeout", type=float, default=20.0)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds that a drill may take")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    has_server = all(map(importlib.util.find_spec, ("fastapi", "uvicorn")))
    outcomes = []
    for start in [s for s in arguments.starts if s != "serve" or has_server]:
        for fault in arguments.faults:
            for rank in arguments.ranks:
                outcomes.append(drill(start, fault, rank, arguments))
                print(_line(outcomes[-1], arguments.limit), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    return 0 if all(o.holds(arguments.limit) for o in outcomes) else 1


def _line(o: Outcome, limit: float) -> str:
    learned = "    -" if o.learned is None else f"{o.learned:5.1f}"
    verdict = "ok  " if o.holds(limit) else "FAIL"
    return (
        f"{verdict} {o.start:9}{o.fault:11}rank {o.rank}  learned {learned} s  ended {o.ended:5.1f} s  "
        f"code {o.code}  left {o.left}  {o.reason}"
    )


if __name__ == "__main__":
    sys.exit(main())
