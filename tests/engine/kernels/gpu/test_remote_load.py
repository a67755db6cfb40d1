"""The chain of reads under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from tests.triton_interpreter import allow_scalar_arrays
from engine.kernels.gpu.remote_load import chase
allow_scalar_arrays()
steps = torch.tensor([1, 2, 3, 4, 5, 5], dtype=torch.int32)
out = torch.zeros(1, dtype=torch.int32)
chase(steps, out, 3)
assert out.item() == 3, out
"""


def test_each_read_is_where_the_one_before_said():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
