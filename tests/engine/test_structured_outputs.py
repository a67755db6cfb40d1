"""What an answer must be, as plain data."""

import pytest

from engine import SamplingParams, StructuredOutputs
from engine.errors import InvalidRequestError


def test_fields_of_another_kind_are_refused():
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    for fields in ({"choice": "yes"}, {"json": {"a": {1}}}, {"json": deep}, {"regex": "a", "begins_at": 5}):
        with pytest.raises(InvalidRequestError) as caught:
            StructuredOutputs(**fields)
        assert caught.value.param == "structured_outputs"
    with pytest.raises(InvalidRequestError, match="structured_outputs must be"):
        SamplingParams(structured_outputs={"regex": "a"})


def test_a_prompt_that_opens_the_reasoning_binds_what_comes_after_it():
    one = StructuredOutputs(regex="a")
    assert one.begun_by([1, 2], 2, 3).begins_after == (3,)
    assert one.begun_by([2, 1], 2, 3) == one.begun_by([2], None, 3) == one
    at = StructuredOutputs(regex="a", begins_at=(5,))
    assert at.begun_by([2], 2, 3) is at
