"""Attention by heads under Triton's interpreter, in a child process that has it switched on."""

from __future__ import annotations

import pytest
import torch

from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
from engine.kernels import reference
from engine.kernels.gpu import heads
from tests.head_cases import SCALE, check_rotate, check_store, expected_heads, head_case
from tests.mla_cases import relative_error

if INTERPRETED:
    allow_scalar_arrays()
# Not bfloat16, whose products the interpreter of Triton 3.6 takes of the bits as integers.
SMALL = {"page": 16, "dtype": torch.float16}


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


@interpreted
@pytest.mark.parametrize(("shape", "max_splits"), [((2, 1, 32), 2), ((2, 2, 32), 4), ((4, 2, 64), 4)])
def test_any_lengths(shape, max_splits):
    """No keys, a split's border and beyond it, splits of several tiles."""
    case = head_case([0, 64, 65, 150], shape, **SMALL)
    found, expected = case.attend(max_splits=max_splits), expected_heads(case)
    assert found.dtype == case.q_NHd.dtype and not found[0].any()
    assert relative_error(found, expected) < 1e-3
    twin = reference.attend_heads(case.q_NHd, case.cache, case.table_NB, case.seq_lens_N, SCALE)
    assert relative_error(twin, expected) < 1e-3


@interpreted
def test_a_row_has_the_same_bits_in_any_batch():
    case = head_case([150, 0, 40], (2, 1, 32), **SMALL)
    whole = case.attend(max_splits=2)
    for rows in (slice(0, 1), slice(1, 3)):
        assert torch.equal(case.part(rows).attend(max_splits=2), whole[rows])


@interpreted
def test_keys_beyond_the_table_are_not_there():
    case = head_case([64, 128], (2, 1, 32), **SMALL)
    case.table_NB = case.table_NB[:, :8]
    expected = case.attend()
    case.seq_lens_N[1] += 70
    assert torch.equal(case.attend(), expected)


@interpreted
@pytest.mark.parametrize(("rows", "num_heads", "width"), [(3, 5, 64), (2, 17, 128)])
def test_turning_and_storing(rows, num_heads, width):
    for dtype in (torch.float16, torch.float32):
        check_rotate(rows, num_heads, width, dtype, "cpu")
    check_store(rows, num_heads, width, torch.float16, "cpu")


def test_shapes_without_a_kernel_are_refused():
    cache, slots = torch.zeros(2, 16, 64), torch.zeros(3, dtype=torch.int64)
    x = torch.zeros(3, 2, 48)
    with pytest.raises(ValueError, match="width 48"):
        heads.rotate_halves(x, torch.zeros(3, 48))
    with pytest.raises(ValueError, match="lie apart"):
        heads.rotate_halves(torch.zeros(3, 32, 2).transpose(1, 2), torch.zeros(3, 32))
    with pytest.raises(ValueError, match="holds 64 numbers"):
        heads.store_heads(cache, x, x, slots)
    with pytest.raises(ValueError, match="multiple"):
        heads.attend_heads(torch.zeros(3, 3, 32), torch.zeros(2, 16, 128), slots[:, None], slots.int(), 1.0)
