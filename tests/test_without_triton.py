"""Machines without Triton: nothing imports it before a GPU's kernels are asked for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import engine, engine.llm, engine.server.app, engine.worker, engine.bench.__main__
from engine.bench.__main__ import parser
parser()
llm = engine.LLM(device="cpu", num_threads=1)
print(llm.generate("Hello", engine.SamplingParams(max_tokens=2, temperature=0.0))[0].outputs[0].token_ids)
assert not any(name.startswith("engine.kernels.gpu.") for name in sys.modules)
"""


def test_the_engine_runs_on_a_cpu_with_triton_blocked():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr[-3000:]
