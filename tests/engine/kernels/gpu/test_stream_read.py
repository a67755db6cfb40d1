"""The streaming read under Triton's interpreter, and compiled for every architecture without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BLOCK, LOADS = 2048, 2

SCRIPT = """
import torch
from engine.kernels import reference
from engine.kernels.gpu.stream_read import stream_read
BLOCK, LOADS = 2048, 2
x = torch.randint(-8, 9, (3 * LOADS * 5 * BLOCK,)).float()
assert torch.equal(stream_read(x, (5, BLOCK, LOADS)), reference.stream_read(x, 5, BLOCK))
try:
    stream_read(x[:-1], (5, BLOCK, LOADS))
except ValueError as error:
    assert "whole rounds" in str(error)
else:
    raise AssertionError("an uneven buffer was accepted")
"""


def test_every_number_is_read_once():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_it_compiles_to_wide_loads(capability):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.kernels.gpu.stream_read import _stream_read

    source = ASTSource(
        _stream_read,
        {"x": "*fp32", "sums": "*fp32", "NUM_STEPS": "constexpr", "BLOCK": "constexpr", "LOADS": "constexpr"},
        {"NUM_STEPS": 58, "BLOCK": BLOCK, "LOADS": LOADS},
        {(0,): [["tt.divisibility", 16]]},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert compiled.asm["ptx"].count("ld.global.v4") >= LOADS and compiled.metadata.shared <= 99 * 1024
