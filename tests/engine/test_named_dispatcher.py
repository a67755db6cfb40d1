"""A named dispatcher that cannot run is refused in one sentence, before a rank starts or a weight is read."""

from __future__ import annotations

import time

import pytest

from engine.comm.step_watch import Patience
from engine.config import ConfigError, EngineConfig
from engine.launch import start_engine


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["deepep", "nccl_ep"])
def test_refused_at_once(name, tp):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"moe_comm='{name}' (runs|needs) .*; use one of the others"):
        start_engine(EngineConfig(tp=tp, ep=tp, device="cpu", moe_comm=name))
    assert time.monotonic() - started < 10, "no rank was started"


def test_a_short_step_limit_leaves_time_to_answer():
    """A process is asked every second; one that answers is not taken as stopped."""
    assert Patience(step=0.2).silence >= 3.0 and Patience(step=20.0).silence == 8.0
