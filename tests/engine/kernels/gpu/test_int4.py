"""Packing of INT4 weights into the kernels' tiles, without a kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import reference

pytest.importorskip("triton")
from engine.kernels.gpu.experts import empty_experts, expanded, put_down, put_gate_or_up
from engine.kernels.gpu.int4 import pack_int4, unpack_tiles
from tests.int4_experts import random_matrix


@settings(max_examples=20, deadline=None)
@given(row_tiles=st.integers(1, 3), column_blocks=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_tiles_hold_the_weight_rounded_once(row_tiles, column_blocks, seed):
    packed, scale = random_matrix(64 * row_tiles, 128 * column_blocks, torch.Generator().manual_seed(seed))
    words, scales = pack_int4(packed, scale)
    assert words.shape == (row_tiles, column_blocks, 64, 32) and words.dtype == torch.int16
    assert torch.equal(unpack_tiles(words, scales), reference.unpack_int4(packed, scale).bfloat16())


def test_word_and_nibble_of_a_column():
    packed = torch.zeros(64, 16, dtype=torch.int32)
    packed[3, (32 * 2 + 5) // 8] = 9 << 4 * (5 % 8)
    words, _ = pack_int4(packed, torch.ones(64, 4))
    assert words[0, 0, 3, 5] == 9 << 8 and words.count_nonzero() == 1


@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (64, 64), (96, 256)])
def test_shapes_that_are_no_whole_tiles_are_refused(rows, columns):
    with pytest.raises(ValueError, match="multiple of 64 rows and of 128 columns"):
        pack_int4(torch.zeros(rows, columns // 8, dtype=torch.int32), torch.ones(rows, columns // 32))


def test_experts_are_filled_in_any_order():
    generator = torch.Generator().manual_seed(2)
    packed = empty_experts(2, 256, 128, torch.device("cpu"))
    matrices = {}
    for name in ("up", "down", "gate"):
        for index in (1, 0):
            shape = (256, 128) if name == "down" else (128, 256)
            matrix = random_matrix(*shape, generator)
            matrices[name, index] = reference.unpack_int4(*matrix).bfloat16()
            if name == "down":
                put_down(packed, index, *matrix)
            else:
                put_gate_or_up(packed, index, name == "up", *matrix)
    gate_up, down = expanded(packed)
    for index in (0, 1):
        assert torch.equal(gate_up[index], torch.cat((matrices["gate", index], matrices["up", index])))
        assert torch.equal(down[index], matrices["down", index])


def test_widths_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="multiples of 128"):
        empty_experts(1, 256, 64, torch.device("cpu"))
