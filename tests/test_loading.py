"""serve.py while it loads from a disk that stands still: what it says, what it leaves behind when it is ended."""

from __future__ import annotations

import os
import re
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from engine.loading.checksums import write_sums
from tests.checkpoints import SMALL, build_checkpoint
from tests.processes import PYTHON, TORCHRUN, Program, running, until
from tests.slow_disk import SlowDisk

CERTIFICATE = "tests/engine/server/loopback.pem"  # of 127.0.0.1, with its key
KEY = {"authorization": "Bearer a-key"}
TORCHRUN_2 = [*TORCHRUN, "--nproc-per-node", "2"]
TWO_RANKS = ["--tp", "2", "--ep", "2"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    directory = build_checkpoint(tmp_path_factory.mktemp("small"), SMALL)
    write_sums(directory, [file.name for file in directory.glob("*.safetensors")])
    return directory


def command(launcher: list[str], model: Path, *options: str) -> list[str]:
    fixed = ["--device", "cpu", "--num-threads", "1", "--port", "0", "--model", str(model)]
    return [*launcher, "serve.py", *fixed, *options]


def probe(program: Program, certificate: str | None = None) -> httpx.Client:
    """A client of the server that loads; one connection, kept. certificate: the only one that it trusts, over https."""
    scheme = "https" if certificate else "http"
    url = program.expect(rf"loading; ({scheme}://127\.0\.0\.1:\d+)/health")[1]
    verify = ssl.create_default_context(cafile=certificate) if certificate else True
    limits = httpx.Limits(max_connections=1)
    return httpx.Client(base_url=url, timeout=60, trust_env=False, limits=limits, verify=verify)


def has_begun(http: httpx.Client) -> bool:
    """Every rank has read something, else nobody knows when the last will be done."""
    progress = http.get("/health").json()["progress"]
    return progress["phase"] == "reading weights" and progress["seconds_left"] is not None


def test_health_is_503_with_progress_until_the_same_connection_gets_answers(small, tmp_path):
    """As a readiness probe sees it, over https. Every other call is refused as while the server drains, keys are asked
    for. Whoever comes when the server is ready sees the same certificate."""
    disk, options = SlowDisk(tmp_path), ["--api-key", "a-key", "--ssl-certfile", CERTIFICATE]
    with running(command(PYTHON, small, *options), tmp_path, PYTHONPATH=disk.python_path) as program:
        with probe(program, CERTIFICATE) as http:
            until(lambda: has_begun(http), 60, "bytes have been read")
            answer = http.get("/health")
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            body = answer.json()
            assert (
                body["status"] == body["error"]["code"] == "loading" and "reading weights" in body["error"]["message"]
            )
            assert 0 < body["progress"]["bytes_done"] < body["progress"]["bytes_total"]
            assert http.get("/v1/models").status_code == 401
            refused = http.post("/v1/completions", json={"prompt": "The"}, headers=KEY)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "loading"
            disk.open()
            until(lambda: http.get("/health").status_code == 200, 60, "it serves")
            assert http.get("/health").json() == {"status": "ok"}
            answer = http.post("/v1/completions", json={"prompt": "The", "max_tokens": 2}, headers=KEY)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
        with probe(program, CERTIFICATE) as http:
            assert http.get("/health").status_code == 200
        program.signal(signal.SIGTERM)
        assert program.ends() == 0 and "Traceback" not in program.output, program.output


@pytest.mark.slow
def test_a_rank_whose_disk_stands_still_is_named_with_its_bytes(small, tmp_path):
    """The other has read all of its share and waits for it, in no collective."""
    disk = SlowDisk(tmp_path, rank=1)
    options = [*TWO_RANKS, "--comm-timeout", "25"]
    with running(command(PYTHON, small, *options), tmp_path, PYTHONPATH=disk.python_path) as program:
        program.expect(r"serve\.py: rank 1 has read nothing for 20 s while reading weights, at 0\.00 of 0\.00 GB;")
        assert program.ends() == 1 and "Traceback" not in program.output, program.output


def shared_memory(program: Program) -> set[str]:
    """Files of shared memory that its processes have mapped."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in program.commands()]
    return set(re.findall(r"/dev/shm/\S+", "".join(maps)))


def contents(directory: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("launcher", "number", "moment"),
    [
        pytest.param(PYTHON, signal.SIGINT, "weights", id="python-int"),
        pytest.param(PYTHON, signal.SIGTERM, "sums", id="python-term-sums"),
        pytest.param(TORCHRUN_2, signal.SIGTERM, "weights", id="torchrun-term", marks=pytest.mark.slow),
        pytest.param(TORCHRUN_2, signal.SIGINT, "sums", id="torchrun-int-sums", marks=pytest.mark.slow),
        pytest.param(PYTHON, signal.SIGTERM, "weights", id="python-term", marks=pytest.mark.slow),
        pytest.param(TORCHRUN_2, signal.SIGINT, "weights", id="torchrun-int", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_mid_load_leaves_nothing(small, tmp_path, launcher, number, moment):
    """No process, no file, no shared memory, within seconds."""
    disk, places = SlowDisk(tmp_path), {name: tmp_path / name for name in ("TMPDIR", "XDG_CACHE_HOME")}
    for place in places.values():
        place.mkdir()
    before = contents(small)
    options = [*TWO_RANKS, "--verify-checksums"] if moment == "sums" else TWO_RANKS
    environment = {name: str(place) for name, place in places.items()} | {"PYTHONPATH": disk.python_path}
    with running(command(launcher, small, *options), tmp_path, **environment) as program:
        with probe(program) as http:
            until(lambda: disk.sums_have_begun if moment == "sums" else has_begun(http), 60, "it is in the middle")
            progress = http.get("/health").json()["progress"]
            assert progress["phase"] == {"weights": "reading weights", "sums": "verifying checksums"}[moment]
            assert progress["bytes_total"] > 0
        mapped = shared_memory(program)
        program.signal(number)
        code = program.ends(5)
        assert code == (-number if launcher is PYTHON else 1), program.output
        assert launcher is not PYTHON or "Traceback" not in program.output, program.output
    assert contents(small) == before
    assert [path for path in mapped if os.path.exists(path)] == []
    left = [path for place in places.values() for path in place.rglob("*") if path.is_file()]
    assert left == []
