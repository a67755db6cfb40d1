from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loading.checkpoint_headers import TensorHeader
from engine.loading.tensor_reader import Wish
from engine.loading.weights import FiniteChecks

WISH = Wish("w", TensorHeader(Path("a.safetensors"), "BF16", (1,)), (slice(None),))
BAD = (float("nan"), -float("nan"), float("inf"), -float("inf"))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_one_bad_value_anywhere_is_found_and_none_is_not(data):
    """In rows that lie together and in cut columns, of every length that vectors have rests of."""
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 300))
    value = torch.randn(rows, columns + 7).to(dtype)[:, :columns]
    value[0, 0] = torch.finfo(dtype).max
    FiniteChecks().add(WISH, value)
    value[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))] = data.draw(st.sampled_from(BAD))
    with pytest.raises(ValueError, match="not a number or infinite"):
        FiniteChecks().add(WISH, value)


def test_integers_and_nothing_have_no_such_values():
    checks = FiniteChecks()
    checks.add(WISH, torch.full((3,), -1, dtype=torch.int32))
    checks.add(WISH, torch.empty(0, 4))
    assert checks.finish() is None
