"""The byte model against the figures that were computed for the real model by hand."""

from __future__ import annotations

import json

import pytest

from engine.bench.roofline import ShareSizes
from engine.config import FULL_CONFIG
from models.kimi_k25.config import KimiConfig


@pytest.fixture(scope="module")
def full() -> KimiConfig:
    return KimiConfig.from_dict(json.loads((FULL_CONFIG / "config.json").read_text()))


def test_a_rank_of_tp8_reads_what_the_tables_say(full):
    sizes = ShareSizes(full, 8, 1)
    megabytes = [2 * n / 1e6 for n in (sizes.attention, sizes.shared, sizes.router, sizes.dense, sizes.head)]
    assert megabytes == pytest.approx([51.8, 11.0, 5.5, 99.1, 293.6], abs=0.06)
    assert sizes.fixed * 2 / 1e9 == pytest.approx(4.542, abs=1e-3)
    assert sizes.total_bytes() / 1e9 == pytest.approx(76.2, abs=0.1)
    assert sizes.kv_bytes(1) == 70272


@pytest.mark.parametrize(
    ("batch", "context", "distinct", "milliseconds"),
    [(1, 4096, 8, 1.36), (8, 4096, 59.5, 3.85), (64, 2048, 284.2, 14.3)],
)
def test_rooflines_of_the_goals(full, batch, context, distinct, milliseconds):
    sizes = ShareSizes(full, 8, 1)
    num_bytes = sizes.weight_bytes(round(60 * distinct)) + sizes.kv_bytes(batch * context)
    assert num_bytes / 4.65e12 * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_whole_experts_weigh_as_much_as_slices(full):
    sliced, whole = ShareSizes(full, 8, 1), ShareSizes(full, 8, 8)
    assert whole.expert_bytes / 1e6 == pytest.approx(24.77, abs=0.01)
    assert whole.expert_bytes == 8 * sliced.expert_bytes
    assert whole.total_bytes() == sliced.total_bytes()


def test_prefill_flops_count_every_weight_once_a_token(full):
    """Per token 2 FLOPs for each of the 31.7 billion active parameters, the head left out, and the attention beside."""
    sizes, tokens = ShareSizes(full, 1, 1), 1000
    flops = sizes.prefill_flops(tokens, 60 * 8 * tokens)
    attention = 2 * (128 + 64 + 128) * 64 * 61 * tokens * (tokens + 1) / 2
    weights = (flops - attention) / (2 * tokens)
    assert weights == pytest.approx(31.7e9 - sizes.head * (1 - 1 / tokens), rel=0.002)
