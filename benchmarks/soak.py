"""Hundreds of concurrent HTTP streams against a real `serve.py`; a fifth hang up, some are bad, they come in bursts.

    python -m benchmarks.soak --json benchmarks/soak_cpu.json                 # 256 streams for 10 minutes
    python -m benchmarks.soak --minutes 0.35 --streams 64 --requests 40       # a short one
    python -m benchmarks.soak --draft auto --tp 2 --json soak.json

Holds when every answer that came to its end equals the one that the same request got alone on an empty cache, those cut
short are the beginning of theirs, and at the end nothing runs or waits, no block is held, free and cached ones are all
there are, memory and open files are flat, no call got a 5xx, and tokens never stopped for 5 s. The KV cache is so small
that requests push each other out and cached beginnings are given up. Prints one line; exit code 0 if all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.soak_load import Load, call, draw_requests
from engine.bench.report import environment

ROOT = Path(__file__).resolve().parent.parent
MODEL_LEN = 1024
START_SECONDS, SETTLE_SECONDS, END_SECONDS = 300.0, 60.0, 60.0
STALL_SECONDS = 5.0
FEW_FILES = 8  # more open at the end than at the start: the client's own last connections
METRIC = re.compile(r"^turnout_(\w+?)(?:\{(?:state|reason)=\"(\w+)\"\})? ([\d.e+-]+)$", re.MULTILINE)


def parser() -> argparse.ArgumentParser:
    main_parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    main_parser.add_argument("--minutes", type=float, default=10.0)
    main_parser.add_argument("--streams", type=int, default=256, help="clients at once (default %(default)s)")
    main_parser.add_argument("--requests", type=int, default=240, help="different ones (default %(default)s)")
    main_parser.add_argument("--seed", type=int, default=0)
    main_parser.add_argument("--model", help="checkpoint directory (default: the bundled tiny one)")
    main_parser.add_argument("--draft", default="none", help="EAGLE-3 draft directory, auto, or none (default)")
    main_parser.add_argument("--tp", type=int, default=1)
    main_parser.add_argument("--max-num-seqs", type=int, default=64)
    main_parser.add_argument("--kv-cache-memory-gb", type=float, default=0.04, help="small (default %(default)s)")
    main_parser.add_argument("--memory-tolerance", type=float, default=0.03, help="of the last third over the middle")
    main_parser.add_argument("--json", type=Path, metavar="FILE")
    return main_parser


class Server:
    """A `serve.py` of its own and what it takes of the machine."""

    def __init__(self, process: subprocess.Popen, port: int):
        self.process, self.port = process, port

    def pids(self) -> list[int]:
        """The server's process and the ranks that it started."""
        found = [self.process.pid]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):  # gone
                continue
            if parent == self.process.pid:
                found.append(int(folder.name))
        return found

    def resident_bytes(self) -> int:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.pids()]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    async def metrics(self) -> dict[str, float]:
        """Name, or name and its one label -> value."""
        _, text = await call(self.port, "/metrics", b"", method="GET")
        return {f"{name} {label}".strip(): float(value) for name, label, value in METRIC.findall(text.decode())}


@contextmanager
def serving(arguments: argparse.Namespace, log: Path) -> Iterator[Server]:
    command = [sys.executable, "serve.py", "--port", "0", "--device", "cpu", "--num-threads", "1"]
    command += ["--tp", str(arguments.tp), "--draft", arguments.draft, "--max-model-len", str(MODEL_LEN)]
    command += ["--max-num-seqs", str(arguments.max_num_seqs), "--max-num-batched-tokens", "512"]
    command += ["--kv-cache-memory-gb", str(arguments.kv_cache_memory_gb)]
    command += ["--model", arguments.model] if arguments.model else []
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield Server(process, _port_of(process, log))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _port_of(process: subprocess.Popen, log: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"serving \S+ on http://[\d.]+:(\d+)", log.read_text(errors="replace")):
            return int(match[1])
        time.sleep(0.05)
    raise SystemExit(f"error: the server does not serve:\n{log.read_text(errors='replace')[-3000:]}")


class Watch:
    """Looks at server and clients while they are at work; a second apart."""

    def __init__(self, server: Server, load: Load, num_blocks: int):
        self._server, self._load, self._num_blocks = server, load, num_blocks
        self.resident: list[int] = []
        self.tokens: list[int] = []
        self.wrong_looks = 0

    async def run(self) -> None:
        while True:
            for _ in range(4):
                await asyncio.sleep(0.25)
                self._load.look()
            self.resident.append(self._server.resident_bytes())
            self.tokens.append(self._load.num_tokens)
            status, _ = await call(self._server.port, "/health", b"", method="GET")
            blocks = blocks_of(await self._server.metrics())
            self.wrong_looks += status != 200 or sum(blocks.values()) != self._num_blocks

    def memory_growth(self) -> float:
        """Memory of the last third over that of the middle one, less 1."""
        third = len(self.resident) // 3
        if not third:
            return 0.0
        return statistics.median(self.resident[-third:]) / statistics.median(self.resident[third:-third]) - 1


def blocks_of(metrics: dict[str, float]) -> dict[str, int]:
    return {state: int(metrics[f"kv_cache_blocks {state}"]) for state in ("free", "cached", "held")}


async def soak(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load(server.port, draw_requests(arguments.requests, arguments.seed), arguments.seed)
    num_blocks = sum(blocks_of(await server.metrics()).values())
    began = time.monotonic()
    await load.find_answers()
    await call(server.port, "/flush_cache", b"{}")
    alone, files = time.monotonic() - began, server.open_files()
    watch = Watch(server, load, num_blocks)
    watching = asyncio.ensure_future(watch.run())
    await load.run(arguments.streams, 60 * arguments.minutes)
    watching.cancel()
    (failure,) = await asyncio.gather(watching, return_exceptions=True)
    if not isinstance(failure, asyncio.CancelledError):
        raise failure
    idle = await _settle(server)
    return _result(arguments, load, watch, idle, num_blocks) | {
        "seconds_alone": alone,
        "open_files": [files, server.open_files()],
    }


async def _settle(server: Server) -> dict[str, float]:
    """The metrics once nothing runs, or what they are when that takes too long."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        metrics = await server.metrics()
        busy = metrics["num_requests_running"] + metrics["num_requests_waiting"] + metrics["kv_cache_blocks held"]
        if not busy or time.monotonic() > deadline:
            return metrics
        await asyncio.sleep(0.2)


def _result(
    arguments: argparse.Namespace, load: Load, watch: Watch, idle: dict[str, float], num_blocks: int
) -> dict[str, Any]:
    shown = ("num_preemptions_total", "steps_total", "prefix_cache_query_tokens_total", "prefix_cache_hit_tokens_total")
    finished = {key.split()[1]: int(value) for key, value in idle.items() if key.startswith("request_finished_total ")}
    return {
        "calls": dict(load.counts),
        "statuses": {str(status): count for status, count in sorted(load.statuses.items())},
        "wrong": load.wrong,
        "tokens": load.num_tokens,
        "seconds": load.seconds,
        "tokens_per_second": load.num_tokens / load.seconds,
        "longest_stall_seconds": load.longest_stall,
        "finished": finished,
        "at_the_end": {key: idle[key] for key in ("num_requests_running", "num_requests_waiting")} | blocks_of(idle),
        "num_blocks": num_blocks,
        "looks": len(watch.resident),
        "wrong_looks": watch.wrong_looks,
        "server": {key: idle[key] for key in shown},
        "resident_bytes": watch.resident,
        "memory_growth": watch.memory_growth(),
        "tokens_by_second": watch.tokens,
    }


def checks(result: dict[str, Any], memory_tolerance: float) -> dict[str, bool]:
    calls, end = result["calls"], result["at_the_end"]
    return {
        "answers equal": calls.get("completed", 0) > 0 and not calls.get("different"),
        "no call failed": not calls.get("failed"),
        "bad requests refused": calls.get("bad", 0) > 0 and not calls.get("wrongly taken"),
        "no 5xx": not any(status >= "500" for status in result["statuses"]),
        "nothing runs or waits": end["num_requests_running"] == end["num_requests_waiting"] == 0,
        "no block held": end["held"] == 0,
        "blocks add up": end["free"] + end["cached"] == result["num_blocks"] and not result["wrong_looks"],
        "memory flat": abs(result["memory_growth"]) <= memory_tolerance,
        "files closed": result["open_files"][1] <= result["open_files"][0] + FEW_FILES,
        "tokens never stopped": result["longest_stall_seconds"] < STALL_SECONDS,
        "server ended well": result["exit_code"] == 0,
    }


def main(argv: list[str] | None = None) -> int:
    command = ["python", "-m", "benchmarks.soak", *(sys.argv[1:] if argv is None else argv)]
    arguments = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as directory, serving(arguments, Path(directory) / "output") as server:
        result = asyncio.run(soak(server, arguments))
        server.process.send_signal(signal.SIGTERM)
        result["exit_code"] = server.process.wait(END_SECONDS)
    result["checks"] = checks(result, arguments.memory_tolerance)
    result["passed"] = all(result["checks"].values())
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        report = {"benchmark": "soak"} | environment(command) | {"settings": settings} | result
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(summary(arguments, result))
    return 0 if result["passed"] else 1


def summary(arguments: argparse.Namespace, result: dict[str, Any]) -> str:
    calls, server = result["calls"], result["server"]
    failed = [name for name, holds in result["checks"].items() if not holds]
    verdict = f"FAILED ({', '.join(failed)})" if failed else "passed"
    num = {kind: calls.get(kind, 0) for kind in ("completed", "different", "left", "bad")}
    return (
        f"soak {verdict}: {arguments.streams} streams for {arguments.minutes:g} min, {num['completed']} answers, "
        f"{num['different']} different, {num['left']} hung up, {num['bad']} bad, "
        f"{result['tokens_per_second']:.0f} tok/s, {server['num_preemptions_total']:.0f} preemptions, memory "
        f"{100 * result['memory_growth']:+.1f} %, longest stall {result['longest_stall_seconds']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
