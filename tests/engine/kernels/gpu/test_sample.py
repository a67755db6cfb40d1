"""The sampling kernels without a GPU: their logic under Triton's interpreter, their code for every architecture."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from engine.kernels.gpu import sample


def test_kernels_agree_with_their_twins_under_the_interpreter():
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    child = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_sample"], env=environment, capture_output=True, text=True, timeout=240
    )
    assert child.returncode == 0, child.stderr[-2000:]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_kernels_compile_within_what_a_block_has(capability):
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    for name, kernel, signature, constexprs, options in sample.compile_cases(capability):
        signature = signature | dict.fromkeys(constexprs, "constexpr")
        signature = {argument: signature[argument] for argument in kernel.arg_names}
        compiled = compile(ASTSource(kernel, signature, constexprs), target=target, options=options)
        assert compiled.metadata.shared <= 99 * 1024, name
        assert "lg2.approx" not in compiled.asm["ptx"], "the noise needs logarithms that are right near 1"
