"""Products, norms, latents and the router under Triton's interpreter, in a child process that has it switched on."""

from __future__ import annotations

import pytest
import torch

from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
from tests import small_kernels as small

if INTERPRETED:
    allow_scalar_arrays()

# Not bfloat16, whose products the interpreter of Triton 3.6 takes of the bits as integers.
BENCH = small.Bench("cpu", torch.float16, 1e-3)


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64, 65, 70])
def test_products_of_any_number_of_rows(rows):
    small.check_linear(BENCH, rows, 48, 64, small.dense.Tile(block_o=32, block_i=32, stages=1))


@interpreted
@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"),
    [
        (1, 16, {}),
        (33, 64, {}),
        (31, 80, {}),  # half a block of inputs at the end
        (64, 128, {"parts": 4}),
        (17, 96, {"parts": 2}),  # each part ends in half a block
        (40, 24, {}),  # fewer inputs than a block
    ],
)
def test_products_of_odd_shapes(outputs, inputs, tile):
    small.check_linear(BENCH, 3, outputs, inputs, small.dense.Tile(block_o=16, block_i=32, stages=1, **tile))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 100)])
def test_add_norm(rows, width, parts, dtype):
    small.check_add_norm(BENCH, rows, width, parts, dtype)
    small.check_sum_parts(BENCH, rows, width, max(parts, 1), dtype)


@interpreted
def test_norm_and_activation():
    for rows, width in ((1, 64), (4, 7), (3, 100)):
        small.check_rms_norm(BENCH, rows, width)
        small.check_silu_mul(BENCH, rows, width)
    small.check_silu_mul(BENCH, 2, 1500)


@interpreted
@pytest.mark.parametrize("with_query_norm", [True, False])
@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (3, 2), (20, 4)])
def test_latents(rows, parts, with_query_norm):
    small.check_latents(BENCH, rows, (40, 32, 16), parts, with_query_norm)


@interpreted
@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (3, 2), (20, 4)])
def test_latents_into_rows_of_bytes(rows, parts):
    small.check_latents_to_bytes(BENCH, rows, (40, 32, 16), parts)


@interpreted
def test_latents_of_keys_alone():
    small.check_latents(BENCH, 3, (0, 32, 16), 2, False)


@interpreted
def test_rows_that_lie_apart():
    for rows in (1, 3, 20):
        small.check_rows_that_lie_apart(BENCH, rows, 48)
    columns = torch.zeros(4, 3, dtype=torch.float16).t()
    with pytest.raises(ValueError, match="lie apart"):
        small.dense.linear_parts(columns, columns, small.dense.Tile())
    with pytest.raises(ValueError, match="lie apart"):
        small.norm.rms_norm(columns, columns[0], 1e-5)


@interpreted
@pytest.mark.parametrize(("rows", "heads", "parts"), [(1, 1, 1), (5, 3, 2), (17, 2, 1), (66, 2, 2)])
def test_absorbed_queries(rows, heads, parts):
    small.check_absorb(BENCH, rows, heads, (32, 16, 128), parts)


@interpreted
def test_rope_of_queries():
    small.check_rope(BENCH, 3, 2, 24, 16)
    small.check_rope(BENCH, 1, 5, 8, 4)


@interpreted
def test_experts_of_low_scores_are_not_lost():
    small.check_route_of_low_scores(BENCH, 24, 6)


@interpreted
@pytest.mark.parametrize("local", [range(24), range(6, 12)])
@pytest.mark.parametrize("top_k", [1, 6, 8])
def test_plan_of_one_row(top_k, local):
    small.check_plan_of_one_row(BENCH, small.Router(24, top_k, local, 20))


@interpreted
@pytest.mark.parametrize("top_k", range(1, 9))
def test_choice_of_experts(top_k):
    small.check_route(BENCH, small.Router(24, top_k, range(24), 20), 4, 2, 4)


@interpreted
@pytest.mark.parametrize("local", [range(0, 8), range(8, 24), range(23, 24)])
@pytest.mark.parametrize("num_tokens", [0, 3, 5])
def test_experts_elsewhere_and_padding_rows(local, num_tokens):
    small.check_route(BENCH, small.Router(24, 6, local), 5, 1, num_tokens)


@interpreted
@pytest.mark.parametrize(("rows", "num_tokens"), [(1, 1), (1, 0), (5, 3), (40, 40)])
@pytest.mark.parametrize("local", [range(24), range(8, 16)])
@pytest.mark.parametrize("top_k", [1, 6, 8])
def test_choices_are_counted(rows, num_tokens, local, top_k):
    small.check_route_counts(BENCH, small.Router(24, top_k, local), rows, num_tokens)


@interpreted
def test_weights_as_they_are_and_one_expert():
    small.check_route(BENCH, small.Router(10, 3, range(10), 8, normalize=False, scale=1.0), 3, 3, 3)
    small.check_route(BENCH, small.Router(1, 1, range(1)), 2, 1, 2)


@interpreted
@pytest.mark.parametrize(("experts", "top_k"), [(8, 8), (13, 3), (16, 1)])
def test_ties_go_to_the_lowest_experts(experts, top_k):
    small.check_route_ties(BENCH, experts, top_k)


@interpreted
def test_a_rows_bits_do_not_depend_on_the_others():
    sizes = {"inputs": 64, "outputs": 40, "nope": 16, "kv": 64, "rope": 16}
    small.check_rows_do_not_depend_on_others(
        BENCH, sizes, small.dense.Tile(block_o=16, block_i=32, parts=2, stages=1), (1, 4, 16)
    )
