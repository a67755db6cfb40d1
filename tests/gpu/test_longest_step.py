"""Bounded steps on one GPU: what is timed at start, and chunks that follow from it."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.launch import start_engine
from engine.sampling_params import SamplingParams
from tests.answers import drain
from tests.checkpoints import TRUE_HEADS
from tests.shares import config_directory

pytestmark = pytest.mark.gpu


def test_steps_are_timed_at_start_and_bound_what_is_prefilled_beside_a_stream(tmp_path):
    settings = {"load_format": "dummy", "tp_share": 2, "kv_cache_memory_gb": 0.2, "max_model_len": 4096}
    core, _ = start_engine(EngineConfig(str(config_directory(tmp_path, TRUE_HEADS)), device="cuda", **settings))
    times = core.replica.runner.prefill_times
    assert [time[:2] for time in times][:3] == [(128, 0), (512, 0), (2048, 0)] and len(times) >= 4
    assert all(0 < seconds < 1 for *_, seconds in times)
    core.add_request("stream", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    for _ in range(8):
        core.step()
    core.add_request("long", [5] * 4000, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    limits = []
    while "long" in core.unfinished_ids():
        core.step()
        limits.append(core.stats().step_budget.limit_tokens)
    assert any(limit is not None and limit >= 1 for limit in limits)
    assert core.stats().step_budget.observed_seconds > 0
    assert len(drain(core)["stream", 0].token_ids) > 0
    core.shutdown()
