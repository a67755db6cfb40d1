"""An engine whose steps are bounded: the same answers in more chunks, small at first, and figures of what it does."""

from __future__ import annotations

import random

import pytest

from engine import rehearsal
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.launch import start_engine
from engine.replica import Replica
from engine.sampling_params import SamplingParams
from engine.server.metrics import EngineCollector
from engine.step_budget import FIRST_TOKENS
from tests.answers import Answer, drain
from tests.checkpoints import SMALL, build_checkpoint

LONG = 80


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("bounded"), SMALL)


def build(checkpoint, **settings) -> EngineCore:
    config = EngineConfig(
        str(checkpoint), device="cpu", dtype="float32", num_threads=1, max_model_len=512, enable_prefix_caching=False
    )
    return start_engine(EngineConfig(**vars(config) | settings))[0]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def stream_beside_a_long_prompt(core: EngineCore) -> dict[tuple[str, int], Answer]:
    """Each of the long prompt's tokens may take a step of its own."""
    drawn = random.Random(1)
    core.add_request("stream", [1, 2, 3], greedy(LONG + 50))
    core.step()
    core.add_request("long", [drawn.randrange(300) for _ in range(LONG)], greedy(4))
    return drain(core)


def test_answers_are_the_same_and_chunks_are_small(checkpoint, monkeypatch):
    chunks: list[int] = []
    step = Replica.step

    def watched(self, plan, prefill_limit):
        output, result = step(self, plan, prefill_limit)
        if len(output.scheduled) > 1:
            chunks.extend(item.num_tokens for item in output.scheduled if item.request.request_id == "long")
        return output, result

    monkeypatch.setattr(Replica, "step", watched)
    free = stream_beside_a_long_prompt(build(checkpoint))
    assert chunks[0] == LONG
    chunks.clear()
    core = build(checkpoint, max_step_ms=1e-3)
    bounded = stream_beside_a_long_prompt(core)
    assert bounded == free
    assert sum(chunks) >= LONG and chunks[0] == FIRST_TOKENS and chunks[1] <= 2 * FIRST_TOKENS
    shown = core.stats().step_budget
    assert shown.limit_tokens is None and shown.observed_seconds > 0 and shown.predicted_seconds > 0


def test_a_prompt_that_takes_the_place_of_one_that_ends_is_bounded_too(checkpoint):
    """Its first chunk is planned in the step that frees the place."""
    core = build(checkpoint, max_step_ms=1e-3, max_num_seqs=2)
    for name in ("stream", "ends"):
        core.add_request(name, [1, 2, 3], greedy(60))
    core.step()
    core.add_request("long", [5] * 300, greedy(4))
    core.step()
    core.abort_request("ends")
    core.step()
    scheduled = core.replica.launched.scheduled
    assert [(i.request.request_id, i.num_tokens) for i in scheduled] == [("stream", 1), ("long", FIRST_TOKENS)]


def test_figures_of_the_bound(checkpoint):
    core = build(checkpoint, max_step_ms=20)
    core.add_request("stream", [1, 2, 3], greedy(40))
    core.step()
    core.add_request("long", [5] * 300, greedy(2))
    core.step()
    shown = {m.name: m.samples[0].value for m in EngineCollector(core.stats(), None, {}, {}).collect() if m.samples}
    assert shown["turnout_prefill_limit_tokens"] == core.stats().step_budget.limit_tokens >= 1
    assert shown["turnout_prefill_step_seconds"] >= 0 and shown["turnout_prefill_step_predicted_seconds"] >= 0
    drain(core)
    idle = {m.name for m in EngineCollector(core.stats(), None, {}, {}).collect()}
    assert "turnout_prefill_limit_tokens" not in idle, "no bound is in force"
    assert build(checkpoint, max_step_ms=0).stats().step_budget is None
    assert build(checkpoint).stats().step_budget is None, "a CPU has no bound of its own"


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"device": "cuda"}, 0.05),
        ({"device": "cpu"}, None),
        ({"device": "cpu", "max_step_ms": 30}, 0.03),
        ({"device": "cuda", "max_step_ms": 0}, None),
        ({"device": "cuda", "max_step_ms": 12.5}, 0.0125),
    ],
)
def test_the_bound_that_a_configuration_asks_for(settings, seconds):
    assert EngineConfig(**settings).longest_step == seconds
    with pytest.raises(ConfigError, match="max_step_ms"):
        EngineConfig(**settings | {"max_step_ms": -1})


def test_steps_are_timed_at_start_within_what_fits(checkpoint):
    runner = build(checkpoint, max_num_batched_tokens=64).replica.runner
    times = rehearsal.prefill_times(runner, [(16, 0), (64, 0), (2048, 0), (32, 10**6)])
    assert [time[:2] for time in times] == [(16, 0), (64, 0), (32, 512 - 32)]
    assert all(seconds > 0 for *_, seconds in times)
    assert runner.prefill_times == [], "on a CPU nothing is timed at start"
