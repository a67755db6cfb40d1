"""What a dry run notes is compiled by other processes into the very entries of the cache that its launches look up."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from types import SimpleNamespace
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
))
from engine.kernels.gpu import norm, route, warm_up

def steps():
    residual, parts = torch.randn(3, 64), torch.randn(2, 3, 64)
    for _ in range(2):
        x, new = norm.add_norm(parts, residual, torch.ones(64), 1e-5)
    ids, weights, *_ = route.route(torch.randn(1, 3, 20), torch.zeros(12), torch.tensor([3], dtype=torch.int32),
                                  range(12), 4, True, 1.0, torch.float32)
    return x, new, ids, torch.empty_like(ids), torch.ones(4)

with warm_up.recorded_launches() as launches:
    x, new, ids, like, ones = steps()
assert knobs.runtime.jit_cache_hook is None
assert not x.any() and not new.any() and not ids.any() and not like.any() and ones.all()
assert [launch.name for launch in launches] == ["add_norm_kernel", "route_kernel"], launches
assert warm_up.compile_all(launches, 2) == (2, [])
assert warm_up.compile_all(launches, 2) == (0, [])

hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
try:
    steps()
except AttributeError as error:  # the launch itself: this driver has none
    assert "launcher_cls" in str(error) or "utils" in str(error), error
assert hits == [True], hits

good = launches[0]
broken = warm_up.Launch(good.module, good.name, good.specialization.replace("*fp32", "*wrong"), 90)
fatal = warm_up.Launch(good.module, good.name, good.specialization, 12)  # ends the compiler's process
for bad, word in ((broken, "add_norm_kernel: "), (fatal, "without a word")):
    count, failures = warm_up.compile_all([bad, launches[1]], 2)
    assert count == 1 and len(failures) == 1 and word in failures[0], failures
"""


def test_a_dry_run_fills_the_cache_on_disk(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
