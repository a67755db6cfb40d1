"""The sampling kernels' logic without a GPU, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_kernels_agree_with_their_twins_under_the_interpreter():
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    child = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_sample"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert child.returncode == 0, child.stderr[-2000:]
