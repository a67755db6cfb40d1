"""A rank that fails while all read together: the others wait for it in a collective, and must not do so for long."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.checkpoints import SMALL, build_checkpoint
from tests.damage import replace
from tests.processes import PYTHON, ROOT, running

SECONDS = 30.0  # far less than the ten minutes that a process group waits
TOGETHER = """
import os, signal
from engine.loading import shared_reads

def gather(parallel):
    gather, calls = shared_reads.Gather.over(parallel), []
    def run(piece_B):
        calls.append(piece_B)
        if parallel.rank == 1 and len(calls) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather.run(piece_B)
    return gather._replace(run=run)

shared_reads.gather_if_faster = gather
"""


def start_fails(directory: Path, model: Path, killed_at: int = 0, tp: int = 2) -> tuple[int, str]:
    """Exit code and output of a server whose ranks, in two groups, read together; killed_at: rank 1 dies in this
    exchange of all ranks."""
    folder = directory / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(TOGETHER.replace("KILLED_AT", str(killed_at)))
    fixed = ["--port", "0", "--device", "cpu", "--num-threads", "1", "--tp", str(tp), "--ep", "2"]
    path = os.pathsep.join([str(folder), str(ROOT)])
    began = time.monotonic()
    with running([*PYTHON, "serve.py", *fixed, "--model", str(model)], directory, PYTHONPATH=path) as program:
        code = program.ends(SECONDS)
        assert time.monotonic() - began < 3 * SECONDS, program.output
        return code, program.output


@pytest.mark.parametrize("expert", [7, pytest.param(0, marks=pytest.mark.slow)])
def test_damage_that_one_rank_finds_ends_all_of_them(tmp_path, expert):
    """A rank's own experts, behind which comes more to read together: there the other rank waits for it."""
    model = build_checkpoint(tmp_path / "model", SMALL, shards=4)
    scale = f"layers.1.mlp.experts.{expert}.gate_proj.weight_scale"
    name, file = replace(model, scale, lambda value: value.fill_(float("inf")))
    code, output = start_fails(tmp_path, model)
    rank = "rank 1 failed to start: " if expert == 7 else ""
    assert f"serve.py: {rank}{file}: tensor {name} holds a value that is not a number" in output, output
    assert code != 0


@pytest.mark.slow
def test_a_rank_that_is_killed_in_between_ends_all_of_them(tmp_path):
    code, output = start_fails(tmp_path, build_checkpoint(tmp_path / "model", SMALL, shards=4), killed_at=2)
    assert code == 1 and "serve.py: rank 1 ended without a word" in output, output


@pytest.mark.slow
def test_damage_within_a_group_ends_the_ranks_of_the_other_too(tmp_path):
    """Ranks 2 and 3 read the last expert's down projection together; 0 and 1 wait for them in the next file."""
    model = build_checkpoint(tmp_path / "model", SMALL, shards=4)
    scale = "layers.1.mlp.experts.7.down_proj.weight_scale"
    name, file = replace(model, scale, lambda value: value.fill_(float("inf")))
    code, output = start_fails(tmp_path, model, tp=4)
    assert f"failed to start: {file}: tensor {name} holds a value that is not a number" in output, output
    assert code != 0
