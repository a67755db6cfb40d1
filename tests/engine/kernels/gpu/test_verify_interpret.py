"""The kernels of a verify step under Triton's interpreter, in a child process that has it switched on."""

from __future__ import annotations

import pytest
import torch

from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
from engine import verify as twin
from engine.kernels.gpu import verify
from tests.verify_cases import check_step, verify_case

if INTERPRETED:
    allow_scalar_arrays()


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


@interpreted
def test_random_steps():
    """Among them every number of accepted guesses, matches beyond the width, places with and without a slot."""
    results = [check_step(verify_case(seed)) for seed in range(14)]
    assert {0, 1, 2} <= {int(n) for r in results for n in r["state accepted_S"]}
    assert any((r["state matched_S"] > r["state accepted_S"]).any() for r in results)
    assert any((r["seq_lens_N"] == 0).any() for r in results) and any((r["slots_M"] < 16).any() for r in results)


@interpreted
@pytest.mark.parametrize(("width", "guesses"), [(1, 0), (1, 1), (1, 15), (2, 1), (4, 3), (16, 15)])
def test_the_ends_of_widths_and_guesses(width, guesses):
    for seed, count in ((1, 1), (2, 5)):
        check_step(verify_case(seed, count, width, guesses))


@interpreted
def test_all_guesses_right_and_none():
    case = verify_case(7, 3, 4, 6)
    tokens_NW = case.tokens_M.view(3, 4)
    case.requests.limits_N[:], case.requests.sources_N[:] = 10**6, -1
    case.requests.guesses_NK[:, :4] = tokens_NW
    case.requests.guesses_NK[1, 0] = -1
    case.requests.guesses_NK[2, 3] += 1
    results = check_step(case)
    assert results["state matched_S"][:3].tolist() == [4, 0, 3] and results["last_N"].tolist() == [3, 4, 11]


@interpreted
def test_more_requests_than_a_program_moves_on():
    case = verify_case(3, 70, 2, 1)
    arguments = (
        case.requests.starts_N.contiguous(),
        (case.requests.limits_N > 0).int(),
        *case.requests[5:3:-1],
        case.block_size,
    )
    found, expected = verify.next_place(*arguments), twin.next_place(*arguments)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.unique(found[2]).numel() > 20


def test_vectors_whose_numbers_lie_apart_are_refused():
    case = verify_case(1, 3, 2, 1)
    with pytest.raises(ValueError, match="lie apart"):
        verify.next_place(case.requests.starts_N, case.requests.sources_N, *case.requests[5:3:-1], 16)
