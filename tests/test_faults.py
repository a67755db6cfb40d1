"""Drills: one rank is killed, stands still, computes for ever, raises or goes its own way. Every process ends within
the time that was promised, with one reason that names the rank, and until then clients hear of it."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from benchmarks.fault_injection import python_path
from tests.checkpoints import SMALL, build_checkpoint
from tests.processes import PYTHON, TORCHRUN, Program, running, until
from tests.test_serve import rest_of, start_stream

PROMISED_SECONDS = 30.0
FAULTY_STEP = 20
TIMEOUT = 4.0


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    return str(build_checkpoint(tmp_path_factory.mktemp("small"), SMALL))


@dataclass(frozen=True)
class Drill:
    """max_tokens FAULTY_STEP: the other ranks have nothing more to do when the fault comes."""

    fault: str
    rank: int
    reason: str
    tp: int = 2
    torchrun: bool = False
    max_tokens: int = 4000
    step_timeout: float = TIMEOUT

    def __str__(self) -> str:
        start = "torchrun" if self.torchrun else "plain"
        return f"{self.fault}-{self.rank}-of-{self.tp}-{start}{'-last' if self.max_tokens < 100 else ''}"

    def command(self, model: str) -> list[str]:
        launcher = [*TORCHRUN, "--nproc-per-node", str(self.tp)] if self.torchrun else PYTHON
        ranks = ["--tp", str(self.tp), "--ep", "2", "--step-timeout", str(self.step_timeout)]
        fixed = ["--port", "0", "--device", "cpu", "--num-threads", "1", "--model", model]
        return [*launcher, "serve.py", *fixed, *ranks]


HANGS = r"hangs in step 20 for \d+ s"
SILENT = "does not respond in step 20"
DRILLS = [
    Drill("stop", 1, f"rank 1 {SILENT}"),
    Drill("stop", 1, f"rank 1 {SILENT}", torchrun=True),
    Drill("loop", 1, f"rank 1 {HANGS}"),
    Drill("loop", 0, f"rank 0 {HANGS}"),
    Drill("disagree", 1, "rank 1 disagrees at step 20: it sampled other tokens than rank 0"),
    Drill("collective", 1, f"rank 1 {HANGS}", max_tokens=FAULTY_STEP),
]
SLOW_DRILLS = [
    Drill("raise", 1, "rank 1 failed: ValueError: made to fail"),
    Drill("raise", 0, "rank 0 failed: ValueError: made to fail"),
    Drill("raise", 1, "rank 1 failed: ValueError: made to fail", torchrun=True),
    Drill("loop", 1, f"rank 1 {HANGS}", torchrun=True),
    Drill("loop", 0, f"rank 0 {HANGS}", torchrun=True),
    Drill("kill", 3, "rank 3 ended without a word", tp=4),
    Drill("kill", 3, "rank 3 ended without a word", tp=4, torchrun=True),
    Drill("stop", 2, f"rank 2 {SILENT}", tp=4),
    Drill("disagree", 2, "rank 2 disagrees at step 20", tp=4),
    Drill("stop", 1, f"rank 1 {SILENT}", step_timeout=20.0),
    Drill("loop", 1, f"rank 1 {HANGS}", step_timeout=20.0),
]


def serving(program: Program) -> int:
    return int(program.expect(r"serving \S+ on http://127\.0\.0\.1:(\d+)")[1])


def cases() -> list:
    slow = [pytest.param(drill, id=f"{drill}-{drill.step_timeout:g}s", marks=pytest.mark.slow) for drill in SLOW_DRILLS]
    return [pytest.param(drill, id=str(drill)) for drill in DRILLS] + slow


@pytest.mark.parametrize("drill", cases())
def test_every_process_ends_with_one_reason_that_names_the_rank(small, tmp_path, drill):
    fault = python_path(tmp_path, drill.fault, drill.rank, FAULTY_STEP)
    with running(drill.command(small), tmp_path, PYTHONPATH=fault) as program:
        port = serving(program)
        stream = start_stream(port, drill.max_tokens)
        began = time.monotonic()
        if drill.max_tokens > FAULTY_STEP:
            assert any("engine_dead" in line for line in rest_of(stream)), program.output
        until(lambda: health(port) in (503, None), PROMISED_SECONDS, "the server knows")
        code = program.ends(PROMISED_SECONDS)
        print(f"{drill}: {time.monotonic() - began:.1f} s from the first token to the end of all")
        assert code == 1, program.output
        assert re.search(rf"ERROR \[rank 0\] {drill.reason}", program.output), program.output
        others = [r for r in range(drill.tp) if r != drill.rank]
        assert not any(f"rank {r} {word}" in program.output for r in others for word in ("hangs", "does not", "ended"))


def health(port: int) -> int | None:
    """The status, None if nobody is there any more."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code
    except httpx.TransportError:
        return None


def test_the_server_answers_503_before_it_is_gone(small, tmp_path):
    drill = Drill("raise", 1, "")
    with running(drill.command(small), tmp_path, PYTHONPATH=python_path(tmp_path, "raise", 1, FAULTY_STEP)) as program:
        port = serving(program)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert client.get("/health").status_code == 200
            stream = start_stream(port, 4000)
            assert any("engine_dead" in line for line in rest_of(stream))
            assert client.get("/health").status_code == 503
            body = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": "The"}
            assert client.post("/v1/completions", json=body).status_code == 503
        assert program.ends() == 1
        assert "rank 1 failed: ValueError: made to fail" in program.output, program.output


def test_a_stopped_rank_0_is_ended_by_the_others(small, tmp_path):
    """It can say nothing itself."""
    drill = Drill("stop", 0, "")
    with running(drill.command(small), tmp_path, PYTHONPATH=python_path(tmp_path, "stop", 0, FAULTY_STEP)) as program:
        stream = start_stream(serving(program), 4000)
        with pytest.raises(httpx.TransportError):
            rest_of(stream)
        assert program.ends() == -9
        # Rank 1 has done step 20 and, if rank 0's word of the next one came, is in that.
        assert re.search(r"ERROR \[rank 1\] rank 0 does not respond in step 2[01]\.", program.output), program.output


SCRIPT = """
import os
from engine import LLM, SamplingParams
llm = LLM(model=MODEL, device="cpu", num_threads=1, tp=2, step_timeout=TIMEOUT)
params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
for _ in range(2):
    try:
        llm.generate([1, 2, 3], params)
    except RuntimeError as error:
        os.write(1, f"{type(error).__name__}: {error}\\n".encode())
llm.close()
os.write(1, b"closed\\n")
"""


@pytest.mark.parametrize(
    ("fault", "rank", "reason"),
    [
        ("stop", 1, "rank 1 does not respond in step 20."),
        pytest.param("loop", 0, f"rank 0 hangs in step 20 for {TIMEOUT:g} s.", marks=pytest.mark.slow),
        pytest.param("loop", 1, f"rank 1 hangs in step 20 for {TIMEOUT:g} s.", marks=pytest.mark.slow),
        pytest.param("raise", 1, "rank 1 failed: ValueError: made to fail", marks=pytest.mark.slow),
        pytest.param("disagree", 1, "rank 1 disagrees at step 20: it sampled", marks=pytest.mark.slow),
    ],
)
def test_generate_raises_in_process(small, tmp_path, fault, rank, reason):
    """Also the next call does, and the process goes on without the engine."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.replace("MODEL", repr(small)).replace("TIMEOUT", str(TIMEOUT)))
    path = python_path(tmp_path, fault, rank, FAULTY_STEP)
    with running([*PYTHON, str(file)], tmp_path, PYTHONPATH=path) as program:
        assert program.ends(60) == 0, program.output
        assert program.output.count(f"EngineDeadError: {reason}") == 2, program.output
        assert program.output.endswith("closed\n")


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "torchrun"])
def test_a_rank_that_raises_at_the_start_is_named(small, tmp_path, torchrun):
    drill = Drill("raise", 1, "", torchrun=torchrun)
    with running(drill.command(small), tmp_path, PYTHONPATH=python_path(tmp_path, "raise", 1, 0)) as program:
        assert program.ends(60) == 1
        assert "serve.py: rank 1 failed to start: made to fail" in program.output, program.output


@pytest.mark.parametrize(
    ("comm_timeout", "idle"),
    [pytest.param(2, 5, id="short"), pytest.param(20, 60, id="long", marks=pytest.mark.slow)],
)
def test_idle_for_longer_than_the_process_group_waits(small, tmp_path, comm_timeout, idle):
    """Nothing is pending meanwhile, so nothing can run out of time."""
    command = [*Drill("", 0, "").command(small), "--comm-timeout", str(comm_timeout)]
    with running(command, tmp_path, PYTHONPATH=str(Path(__file__).resolve().parent.parent)) as program:
        port = serving(program)
        end = time.monotonic() + idle
        until(lambda: health(port) != 200 or time.monotonic() > end, idle + 5, "idle")
        assert health(port) == 200
        assert rest_of(start_stream(port, 8))[-1] == "[DONE]"
        program.signal(signal.SIGTERM)
        assert program.ends() == 0 and "ERROR" not in program.output, program.output
