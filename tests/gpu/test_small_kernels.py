"""Products, norms, latents and the router at K2.5's shapes in bfloat16, launched as dependent kernels."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.gpu import pdl
from tests import small_kernels as small

pytestmark = pytest.mark.gpu
# 2^-8 is half a unit in the last place of bfloat16; the norm over many numbers is smaller.
BENCH = small.Bench("cuda", torch.bfloat16, 4e-3)
ROWS = [1, 4, 16, 33, 64, 70]
# (outputs, inputs) of a rank of 8: latents, queries, output, router with the shared expert, its down product, LM head.
SHAPES = [(2112, 7168), (1536, 1536), (7168, 1024), (896, 7168), (7168, 256), (20480, 7168), (4608, 7168)]


def tile_of(outputs: int, inputs: int) -> small.dense.Tile:
    return small.dense.choose_tile(outputs, inputs, torch.device("cuda"))


def test_kernels_depend_on_each_other_where_the_gpu_can():
    device = torch.device("cuda")
    assert pdl.launch_options(device)["PDL"] == (torch.cuda.get_device_capability() >= (9, 0))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products(outputs, inputs):
    for rows in ROWS:
        for tile in {small.dense.Tile(), tile_of(outputs, inputs)}:
            small.check_linear(BENCH, rows, outputs, inputs, tile)


@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(33, 64, 1), (1, 272, 1), (100, 1184, 2), (7, 16, 1)])
def test_products_of_odd_shapes(outputs, inputs, parts):
    for rows in (1, 17):
        small.check_linear(BENCH, rows, outputs, inputs, small.dense.Tile(parts=parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_norms(parts, dtype):
    for rows in (1, 16, 64, 2048):
        small.check_add_norm(BENCH, rows, 7168, parts, dtype)
        small.check_sum_parts(BENCH, rows, 7168, max(parts, 1), dtype)
    small.check_rms_norm(BENCH, 17, 7168)
    small.check_silu_mul(BENCH, 17, 2304)


@pytest.mark.parametrize("rows", ROWS)
def test_between_the_products_of_attention(rows):
    for parts in (1, 4):
        for with_query_norm in (True, False):
            small.check_latents(BENCH, rows, (1536, 512, 64), parts, with_query_norm)
        small.check_latents_to_bytes(BENCH, rows, (1536, 512, 64), parts)
        small.check_absorb(BENCH, rows, 8, (128, 64, 512), parts)
    small.check_rope(BENCH, rows, 8, 128, 64)


@pytest.mark.parametrize("rows", [1, 4, 64, 2048])
def test_choices_are_counted(rows):
    for num_tokens in (rows, rows - 1):
        small.check_route_counts(BENCH, small.Router(384, 8, range(48, 96), 256), rows, num_tokens)


@pytest.mark.parametrize("local", [range(384), range(48, 96)])
@pytest.mark.parametrize("shared", [0, 256])
def test_router(local, shared):
    for rows in ROWS:
        for parts in (1, 4):
            small.check_route(BENCH, small.Router(384, 8, local, shared), rows, parts, rows - rows // 3)


def test_ties_go_to_the_lowest_experts():
    for top_k in range(1, 9):
        small.check_route_ties(BENCH, 384, top_k)


def test_a_rows_bits_do_not_depend_on_the_others():
    sizes = {"inputs": 7168, "outputs": 384, "nope": 128, "kv": 512, "rope": 64}
    small.check_rows_do_not_depend_on_others(BENCH, sizes, tile_of(384, 7168), (1, 4, 16, 17, 33, 64))
