"""Memory of a rank from the config alone."""

import pytest

from engine.doctor.memory import memory_sum
from engine.doctor.placement import Placement
from tests.engine.doctor.machines import FULL, TP8


def test_full_model_on_eight_large_gpus():
    result = memory_sum(TP8.sizes, 141 * 10**9)
    assert result.weights / 1e9 == pytest.approx(76.2, abs=0.1)
    assert result.token_bytes == 61 * 576 * 2
    spent = result.weights + result.graphs + result.workspace
    assert result.tokens == int((0.98 * 141e9 - spent) // result.token_bytes) > 800_000
    assert f"{result.tokens:,} tokens of context" in result.sentence()


def test_too_few_ranks_do_not_fit():
    result = memory_sum(Placement(FULL, 4, 1).sizes, 141 * 10**9)
    assert result.tokens == 0 and "does not fit; use more ranks" in result.sentence()
