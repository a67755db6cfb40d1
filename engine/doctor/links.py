"""What the machine has, and whether its GPUs reach each other's memory directly or through the host's."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

PAIR_SECONDS = 2.0
START_SECONDS = 30.0
MOST_HANGS = 3
SLOW_SMALL_SECONDS = 60e-6
SLOW_LOAD_SECONDS = 4e-6
SLOW_BYTES_PER_SECOND = 8e9
_SETTINGS = re.compile(r"(NCCL_|TORCH_NCCL_|TORCH_SYMM_MEM_|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Pair:
    """From one GPU to another. bytes_per_second of large copies, small_seconds of a copy of 16 kB until the host sees
    it, load_seconds of one read by a kernel; None where not measured, and `failed` says why."""

    source: int
    target: int
    link: str = "?"
    peer: bool | None = None
    bytes_per_second: float | None = None
    small_seconds: float | None = None
    load_seconds: float | None = None
    failed: str | None = None

    def warning(self) -> str | None:
        """Why a kernel should not push to this peer, in a sentence."""
        path = f"GPU {self.source} -> GPU {self.target}"
        if self.failed is not None:
            return f"{path}: {self.failed}; kernels that wait for a peer would never end there: use allreduce."
        if self.peer is False:
            return f"{path}: no peer access, every byte goes through host memory; switch IOMMU and ACS off."
        slow = {
            f"a copy of 16 kB takes {_us(self.small_seconds)} us": (self.small_seconds or 0) > SLOW_SMALL_SECONDS,
            f"a read takes {_us(self.load_seconds)} us": (self.load_seconds or 0) > SLOW_LOAD_SECONDS,
            f"copies run at {(self.bytes_per_second or 0) / 1e9:.1f} GB/s": (
                (self.bytes_per_second or SLOW_BYTES_PER_SECOND) < SLOW_BYTES_PER_SECOND
            ),
        }
        found = " and ".join(text for text, is_slow in slow.items() if is_slow)
        if not found:
            return None
        return (
            f"{path}: peer access is on, but {found}: it is staged through host memory or shares a busy link; set the "
            "driver's ForceP2P, switch IOMMU and ACS off, and look at the slots (nvidia-smi topo -m)."
        )


@dataclass
class Links:
    """Facts for people and JSON; `pairs` is empty without GPUs or with one."""

    gpus: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    failed: str | None = None

    def warnings(self) -> list[str]:
        found = [pair.warning() for pair in self.pairs]
        return [*filter(None, [self.failed]), *filter(None, found)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"warnings": self.warnings()}


def inspect(num_gpus: int) -> Links:
    """Looks at this host and, with more than one GPU, at every ordered pair of the first `num_gpus`."""
    links = Links(versions=versions(), settings=settings())
    if num_gpus:
        command = [sys.executable, "-m", "engine.doctor.pairs", "--gpus", str(num_gpus)]
        links.gpus, links.pairs, links.failed = watch_pairs(command)
        topology = parse_topology(_output("nvidia-smi", "topo", "-m"))
        for pair in links.pairs:
            pair.link = topology.get((pair.source, pair.target), "?")
    return links


def versions() -> dict[str, str]:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ()
    return {
        "driver": driver[0].strip() if driver else "none found",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or "none",
    }


def settings() -> dict[str, str]:
    """The variables of the environment that change how ranks talk."""
    return {name: value for name, value in sorted(os.environ.items()) if _SETTINGS.match(name)}


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """`nvidia-smi topo -m` -> (from, to) -> NV18, PIX, NODE, SYS ...; nothing of what it does not understand."""
    lines = [_COLOURS.sub("", line).split() for line in text.splitlines()]
    names = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    columns = [int(name[3:]) for name in names if re.fullmatch(r"GPU\d+", name)]
    found = {}
    for words in lines:
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words:
            row = zip(columns, words[1:], strict=False)
            found |= {(int(words[0][3:]), column): word for column, word in row if word != "X"}
    return found


def watch_pairs(
    command: Sequence[str], start_seconds: float = START_SECONDS, pair_seconds: float = PAIR_SECONDS
) -> tuple[list[dict[str, Any]], list[Pair], str | None]:
    """(GPUs, pairs, why it is incomplete) from a process that prints as `pairs` does.

    A pair that is silent for `pair_seconds` is noted and left out of a new try; after MOST_HANGS of them it gives up.
    """
    gpus: list[dict[str, Any]] = []
    pairs: dict[tuple[int, int], Pair] = {}
    options: list[str] = []
    for _ in range(MOST_HANGS + 1):
        reason, last = _watch_once([*command, *options], gpus, pairs, start_seconds, pair_seconds)
        if reason is None:
            return gpus, list(pairs.values()), None
        if last is None:
            return gpus, list(pairs.values()), f"The GPUs could not be looked at: {reason}."
        if last.bytes_per_second is None:
            last.failed = f"a copy {reason}"
        else:  # the copies were fine, a kernel's read was not
            last.failed = f"a kernel's read {reason}"
            options = ["--no-loads"]
        options = [*(o for o in options if o == "--no-loads"), "--skip", json.dumps(list(pairs))]
    return gpus, list(pairs.values()), "Pairs after these were not tried: too many of them hang."


def _watch_once(
    command: Sequence[str],
    gpus: list[dict[str, Any]],
    pairs: dict[tuple[int, int], Pair],
    start_seconds: float,
    pair_seconds: float,
) -> tuple[str | None, Pair | None]:
    """Reads one run; returns (why it did not end by itself, the pair it was at)."""
    last: Pair | None = None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        next_line = _lines(process.stdout.fileno())
        while True:
            limit = start_seconds if last is None else pair_seconds
            line = next_line(limit)
            if line is None:
                return f"did not end within {limit:g} s", last
            if line == "":
                return f"ended the process ({_last_line(process)})", last
            said = json.loads(line)
            if said.pop("done", False):
                return None, None
            gpus[:] = said.pop("gpus", gpus)
            if "pair" in said:
                source, target = said.pop("pair")
                last = pairs.setdefault((source, target), Pair(source, target))
                vars(last).update(said)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _lines(descriptor: int) -> Callable[[float], str | None]:
    """A function that gives the next line within so many seconds, None where there is none, "" at the end."""
    data = bytearray()

    def next_line(seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while b"\n" not in data:
            ready, _, _ = select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            piece = os.read(descriptor, 65536)
            if not piece:
                return ""
            data.extend(piece)
        line, _, rest = bytes(data).partition(b"\n")
        data[:] = rest
        return line.decode()

    return next_line


def _last_line(process: subprocess.Popen) -> str:
    process.wait(PAIR_SECONDS)
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"


def _output(*command: str) -> str:
    """What a program prints; nothing where it is not installed, fails or takes longer than a few seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"
