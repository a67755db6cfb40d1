from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from engine.errors import InvalidRequestError
from engine.request import (
    CompletionDelta,
    CompletionOutput,
    Logprob,
    Request,
    RequestMetrics,
    RequestOutput,
    completion_delta_from_dict,
    request_output_from_dict,
)
from engine.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [("n", v) for v in (0, -1, 129, 1.5, "2", True, None)]
    + [("temperature", v) for v in (-0.1, 2.1, NAN, INF, 10**400, "1", None, True)]
    + [("top_p", v) for v in (0, -0.5, 1.1, NAN, "x", None)]
    + [("top_k", v) for v in (-2, 1.5, "3", True, None)]
    + [("min_p", v) for v in (-0.1, 1.1, NAN, None)]
    + [("seed", v) for v in (2**63, -(2**63) - 1, 1.5, "7", True)]
    + [(n, v) for n in ("presence_penalty", "frequency_penalty") for v in (-2.1, 2.1, NAN, None, "0")]
    + [("repetition_penalty", v) for v in (0, -1, 11, NAN, INF, None)]
    + [("stop", v) for v in ("", [""], ["a", ""], [1], 5, {"a": 1}, ["x"] * 65)]
    + [("stop_token_ids", v) for v in ([-1], [1.5], ["a"], 5, "12", {1: 2}, [True], [1] * 1025)]
    + [("min_tokens", v) for v in (-1, 1.5, None, 17)]
    + [("max_tokens", v) for v in (0, -1, 1.5, "9", True)]
    + [(n, v) for n in ("logprobs", "prompt_logprobs") for v in (-1, 21, 1.5, "5", True)]
    + [("logit_bias", v) for v in ([1], "x", 0, False, {"a": 1}, {"1.5": 1}, {1.9: 1}, {True: 1}, {-1: 1}, {"-1": 1})]
    + [("logit_bias", {1: v}) for v in (101, -101, NAN, "5", None, True)],
)
def test_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name and name in str(caught.value)


def test_spellings_of_the_same():
    assert SamplingParams(stop="a").stop == SamplingParams(stop=("a",)).stop == ["a"]
    assert SamplingParams(stop=None).stop == [] and SamplingParams(top_k=-1).top_k == 0
    assert (
        SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0} and SamplingParams(logit_bias={}).logit_bias is None
    )
    assert SamplingParams(min_tokens=16).min_tokens == 16 and SamplingParams(max_tokens=None, min_tokens=99)


@pytest.mark.parametrize("changes", [{"logit_bias": {100: 1}}, {"stop_token_ids": [5, 100]}])
def test_ids_outside_the_vocabulary(changes):
    SamplingParams(**changes).check_vocab(101)
    with pytest.raises(InvalidRequestError, match="100"):
        SamplingParams(**changes).check_vocab(100)


FULL = SamplingParams(
    n=3, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=-(2**63), presence_penalty=-1.5, frequency_penalty=0.5,
    repetition_penalty=1.1, logit_bias={3: -100.0, 9: 1.25}, stop=["\ud800", "漢"], stop_token_ids=[4],
    include_stop_str_in_output=True, ignore_eos=True, min_tokens=2, max_tokens=None, logprobs=0, prompt_logprobs=20,
    skip_special_tokens=False,
)  # fmt: skip


@pytest.mark.parametrize("params", [SamplingParams(), FULL])
def test_another_rank_reads_the_same_request(params):
    """Through JSON, which turns every key into text."""
    request = Request("r", [1, 2], params, 2**63 - 1, 7, frozenset({5, 4}))
    copy = Request.from_dict(json.loads(json.dumps(request.to_dict())))
    assert vars(copy) == vars(request) and copy.params == params


def test_results_come_back_from_json():
    row = {5: Logprob(-0.5, 1, "a"), 7: Logprob(-2.0, 3)}
    answer = CompletionOutput(0, "a", [5], [row], "stop", "x")
    output = RequestOutput("r", None, [1, 2], [None, row], [answer], RequestMetrics(0.5, 1.5))
    assert request_output_from_dict(json.loads(json.dumps(asdict(output)))) == output
    for delta in (
        CompletionDelta("r", 1, "a", [5], [row], [None, row], "stop", 5, RequestMetrics(0.5)),
        CompletionDelta("r", 0, "", [5]),
    ):
        assert completion_delta_from_dict(json.loads(json.dumps(asdict(delta)))) == delta


def test_token_ids_across_prompt_and_output():
    request = Request("r", [0, 1, 2], SamplingParams(), 0, 99, output_token_ids=[3, 4, 5])
    for start in range(7):
        for stop in range(start, 7):
            assert request.token_ids(start, stop) == list(range(6))[start:stop]


@pytest.mark.parametrize(
    ("tokens", "params", "max_tokens", "end"),
    [
        ([9], {}, 5, ("stop", None)),
        ([8], {"stop_token_ids": [8]}, 5, ("stop", 8)),
        ([1, 9], {}, 2, ("stop", None)),
        ([1, 2], {}, 2, ("length", None)),
        ([9, 1], {"min_tokens": 2}, 5, (None, None)),
        ([9, 9], {"min_tokens": 2}, 5, ("stop", None)),
        ([1], {}, 1, ("length", None)),
    ],
)
def test_where_a_request_ends(tokens, params, max_tokens, end):
    params = SamplingParams(**params)
    request = Request("r", [0], params, 0, max_tokens, frozenset({9, *params.stop_token_ids}))
    for token in tokens:
        assert not request.finished
        assert request.commit([token]) == [token]
    assert (request.finish_reason, request.stop_reason) == end
