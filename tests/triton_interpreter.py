"""Tests of kernels under Triton's interpreter, which a child process has switched on.

With NumPy 2.4 and later, which no longer turns an array of one element into an int.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of test_under_the_interpreter")
starts_interpreter = pytest.mark.skipif(INTERPRETED, reason="is the child process")


def run_interpreted(file: str) -> tuple[int, str]:
    """Runs the tests of a file that are marked `interpreted`: (exit code, what it printed last)."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-x", file]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout[-4000:] + done.stderr[-2000:]


def allow_scalar_arrays() -> None:
    """Lets loop bounds be one-element arrays, which is what the interpreter holds program ids and loads in."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
