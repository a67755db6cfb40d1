"""Rows of the latent cache in FP8: what they keep, what they lose, and where in a row of bytes each part lies."""

from __future__ import annotations

import math

import pytest
import torch

from engine.kernels import kv_layout, reference
from engine.kernels.kv_layout import FP8, LAYOUTS, PLAIN

WIDTHS = [(512, 64), (16, 4), (15, 3), (256, 64)]
PAGE = 4


def rows_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(rows: torch.Tensor, latent: int) -> torch.Tensor:
    return FP8.unpack(FP8.pack(rows, latent), latent, rows.shape[-1] - latent, rows.dtype)


@pytest.mark.parametrize(("latent", "rope"), WIDTHS)
def test_parts_of_a_row_do_not_overlap_and_rows_keep_the_alignment(latent, rope):
    at = kv_layout.places(latent, rope)
    assert latent <= at.rope and at.rope + 2 * rope <= at.scale and at.scale + 4 <= at.end
    assert (at.rope % 2, at.scale % 4, at.end % kv_layout.ROW_ALIGNMENT) == (0, 0, 0)
    assert FP8.width(latent, rope) == at.end == FP8.pack(rows_of(3, latent + rope), latent).shape[1]


def test_a_row_of_the_real_model_is_656_bytes_where_plain_ones_are_1152():
    assert FP8.width(512, 64) * FP8.dtype(torch.bfloat16).itemsize == 656
    assert PLAIN.width(512, 64) * PLAIN.dtype(torch.bfloat16).itemsize == 1152


@pytest.mark.parametrize(("latent", "rope"), WIDTHS)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 300.0, 1e30])
def test_errors_are_those_of_the_types(latent, rope, size):
    """Half a unit of three mantissa bits, or of seven; below the normal numbers half the smallest step."""
    rows = rows_of(9, latent + rope) * size
    got = rounded(rows, latent)
    scale = kv_layout.row_scales(rows[:, :latent].abs().amax(-1, keepdim=True))[0]
    bound = torch.maximum(rows.abs() / 16, scale * 2.0**-10)[:, :latent]
    assert ((got - rows).abs()[:, :latent] <= bound).all()
    assert ((got - rows).abs()[:, latent:] <= rows.abs()[:, latent:] / 256).all()
    assert not torch.equal(got, rows)


def test_the_scale_is_the_least_power_of_two_that_clips_nothing():
    largest = torch.tensor(
        [448.0, 448.0000305, 449.0, 224.0, 1.0, 1.7500001, 1e-38, 3e38, *rows_of(200).abs().tolist()]
    )
    scale, inverse = kv_layout.row_scales(largest)
    for amax, s, i in zip(largest.tolist(), scale.tolist(), inverse.tolist(), strict=True):
        assert math.frexp(s)[0] == math.frexp(i)[0] == 0.5 and s * i == 1.0
        assert amax <= 448 * s and (amax > 224 * s or s == 2.0**-126)


def test_an_outlier_costs_the_others_little():
    """Four thousand times the rest of its row: what a fixed scale would clip, or flush the rest to zero."""
    rows = rows_of(5, 576)
    rows[:, 7] = 4096.0
    got = rounded(rows, 512)
    others = [i for i in range(512) if i != 7]
    error = (got - rows)[:, others].norm() / rows[:, others].norm()
    assert torch.equal(got[:, 7], rows[:, 7]) and 0.01 < error < 0.04


def test_rows_of_zeros_and_fresh_memory_are_zeros():
    assert torch.equal(rounded(torch.zeros(2, 576), 512), torch.zeros(2, 576))
    assert torch.equal(FP8.unpack(torch.zeros(2, 656, dtype=torch.uint8), 512, 64, torch.float32), torch.zeros(2, 576))


def test_what_is_not_a_number_stays_so():
    rows = rows_of(3, 576)
    rows[0, 3], rows[1, 550], rows[2, 5] = float("nan"), float("nan"), float("inf")
    got = rounded(rows, 512)
    assert got[[0, 2]].isnan().all() and got[1, 550].isnan() and got[1, :550].isfinite().all()


def test_bfloat16_holds_what_is_stored_exactly_and_storing_it_again_changes_nothing():
    """So kernels may scale rows, scores or weights, whichever costs least."""
    packed = FP8.pack(rows_of(20, 576).to(torch.bfloat16) * 0.3, 512)
    wide = FP8.unpack(packed, 512, 64, torch.float32)
    assert torch.equal(wide, FP8.unpack(packed, 512, 64, torch.bfloat16).float())
    assert torch.equal(rounded(wide, 512), wide)


def test_roped_numbers_of_bfloat16_lose_nothing():
    rows = (rows_of(20, 576) * 7).to(torch.bfloat16)
    assert torch.equal(rounded(rows, 512)[:, 512:], rows[:, 512:])


def test_a_cache_says_of_itself_what_it_holds():
    for name, layout in LAYOUTS.items():
        cache = torch.zeros(2, PAGE, layout.width(16, 4), dtype=layout.dtype(torch.float32))
        assert kv_layout.of(cache) is layout, name


def test_stored_rows_come_back_as_later_steps_read_them():
    cache, rows = torch.full((3, PAGE, FP8.width(16, 4)), 255, dtype=torch.uint8), rows_of(2, 20)
    stored = reference.store_latent(cache, rows, torch.tensor([PAGE + 1, 2 * PAGE]), 16)
    read = reference.cached_rows(cache, torch.tensor([2, 1]), PAGE + 2, (16, 4), torch.float32)
    assert torch.equal(stored, rounded(rows, 16)) and torch.equal(read[[PAGE + 1, 0]], stored)
    assert (cache[0] == 255).all() and (cache[1, 2:] == 255).all(), "nothing else is written"


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_attention_over_bytes_is_that_over_the_numbers_they_hold(form):
    latent, rope, heads = 16, 4, 2
    cache = FP8.pack(rows_of(6, PAGE, latent + rope), latent)
    plain = FP8.unpack(cache, latent, rope, torch.float32)
    table, query_lens, seq_lens = torch.tensor([[5, 1, 3], [2, 0, 0]]), [3, 1], [9, 2]
    if form == "absorbed":
        q = rows_of(4, heads, latent + rope, seed=1)
        got, expected = (reference.mla_paged(q, c, table, query_lens, seq_lens, 0.3, latent) for c in (cache, plain))
    else:
        q, kv, kv_b = (
            rows_of(4, heads, 8 + rope, seed=1),
            rows_of(4, latent + rope, seed=2),
            rows_of(heads * 14, latent),
        )
        got, expected = (
            reference.mla_prefill(q, kv, c, table, query_lens, seq_lens, 0.3, kv_b) for c in (cache, plain)
        )
    assert torch.equal(got, expected) and got.isfinite().all()
