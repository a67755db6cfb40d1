"""What loading takes of the host's memory, and how long the headers of the full checkpoint take to read and check."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
import torch

from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.loading.extent_reader import RING_BYTES
from engine.model_files import ModelFiles
from engine.model_loading import load_share
from models.kimi_k25.synthetic import Plan, write
from tests.processes import PYTHON

MIB = 2**20
SLACK = 16 * MIB  # Python's objects, and what the allocator keeps in pieces
SIZES = {
    "num_hidden_layers": 5, "n_routed_experts": 8, "hidden_size": 1024, "intermediate_size": 2048,
    "moe_intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 4096,
}  # fmt: skip

LOAD = """
import json, sys, torch
from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.model_files import ModelFiles
from engine.model_loading import load_share

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def load(directory):
    config = EngineConfig(directory, device="cpu", dtype="bfloat16", self_test=False)
    return load_share(config, ModelFiles.read(config), ParallelState())

load(sys.argv[2])
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
model = load(sys.argv[1])
weights = sum(p.nbytes for p in model.parameters())
print(json.dumps({"weights": weights, "peak": status("VmHWM") - before, "after": status("VmRSS") - before}))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, int]:
    """Bytes of a load of 20 files in a process of its own, which has loaded a small model before."""
    made = tmp_path_factory.mktemp("memory")
    plan = Plan.of(SIZES | {"quantization_config": None}, {"vt_num_hidden_layers": 0}, num_files=20)
    small = Plan.of(SIZES | {"num_hidden_layers": 2, "quantization_config": None}, {"vt_num_hidden_layers": 0})
    write(plan, made / "large")
    write(small, made / "small")
    command = [*PYTHON, "-c", LOAD, str(made / "large"), str(made / "small")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(plan.files) == 20 and found["weights"] == plan.num_bytes
    return found | {"largest file": max(file.num_bytes for file in plan.files)}


def test_b155_the_peak_is_the_model_and_what_is_being_read(loaded):
    """A whole checkpoint held beside the model would be twice the weights."""
    assert loaded["weights"] > 12 * loaded["largest file"] > 60 * MIB
    assert loaded["peak"] < loaded["weights"] + RING_BYTES + SLACK < 1.8 * loaded["weights"]


def test_b156_what_loading_took_is_given_back(loaded):
    assert loaded["after"] < loaded["weights"] + SLACK


@pytest.mark.slow
def test_all_headers_of_the_full_checkpoint_in_seconds(tmp_path):
    """Seconds of this process's own time: the disk's part is 30 MB. Of a rank of eight, with whole experts and with
    slices of all."""
    write(Plan.of({}, is_sparse=True), tmp_path)
    for ep in (8, 1):
        config = EngineConfig(str(tmp_path), tp=8, ep=ep, device="cpu", dtype="bfloat16")
        files = ModelFiles.read(config)
        started = time.process_time()
        model = load_share(config, files, ParallelState(device=torch.device("meta"), rank=7, tp=8, ep=ep))
        taken = time.process_time() - started
        assert taken < 5, f"{taken:.1f} s with ep={ep}"
        assert model.expert_storage == "int4" and len(model.layers) == 61
