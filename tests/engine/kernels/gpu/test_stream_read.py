"""The streaming read under Triton's interpreter."""

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
