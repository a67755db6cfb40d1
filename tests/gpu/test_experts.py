"""INT4 experts at K2.5's shapes against float32 on the dequantised weights."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.gpu.experts import PackedExperts, expanded, int4_experts
from tests.int4_experts import random_experts, random_routing

pytestmark = pytest.mark.gpu
WIDTH, SHARED, TOP_K = 7168, 256, 8
LAYOUTS = {"slices": (256, 384, 384), "whole": (2048, 48, 384)}  # expert width, experts here, experts in all


class Case:
    """Experts of one layout and 2048 rows of input; a test takes the first of them."""

    def __init__(self, layout: str):
        inner, here, experts = LAYOUTS[layout]
        generator = torch.Generator("cuda").manual_seed(5)
        self.packed = random_experts(here, WIDTH, inner, generator)
        self.x = torch.randn(2048, WIDTH, generator=generator, device="cuda").bfloat16()
        self.ids, self.weights = random_routing(2048, TOP_K, experts, here, generator)
        self.shared_act = torch.randn(2048, SHARED, generator=generator, device="cuda").bfloat16()
        self.shared_down = (torch.randn(WIDTH, SHARED, generator=generator, device="cuda") / 16).bfloat16()

    def run(self, rows: int, first: int = 0, in_parts: bool = False) -> torch.Tensor:
        """The kernels on `rows` rows, with the allocator's free memory full of NaN."""
        freed = [torch.full((1 << 26,), float("nan"), device="cuda") for _ in range(8)]
        freed += [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 19) for _ in range(4)]
        del freed
        at = slice(first, first + rows)
        inputs = (self.x[at], self.ids[at], self.weights[at])
        return int4_experts(*inputs, self.packed, self.shared_act[at], self.shared_down, in_parts=in_parts)

    def expected(self, rows: int) -> torch.Tensor:
        x, ids, weights = self.x[:rows].float(), self.ids[:rows], self.weights[:rows]
        out = self.shared_act[:rows].float() @ self.shared_down.float().t()
        for expert in ids[ids >= 0].unique().tolist():
            one = PackedExperts(*(tensor[expert : expert + 1] for tensor in vars(self.packed).values()))
            gate_up, down = (w[0].float() for w in expanded(one))
            at, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[at] @ gate_up.t()).chunk(2, -1)
            out[at] += (gate * gate.sigmoid() * up * weights[at, k].unsqueeze(1)) @ down.t()
        return out


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request):
    return Case(request.param)


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 65, 256, 385, 705, 1409, 2048])
def test_like_float32(case, rows):
    expected = case.expected(rows)
    assert (case.run(rows) - expected).norm() < 1e-2 * expected.norm()


def test_a_rows_bits_do_not_depend_on_the_others(case):
    whole = case.run(64)
    for rows in (1, 2, 4, 16, 17):
        for first in (0, 64 - rows):
            assert torch.equal(case.run(rows, first), whole[first : first + rows])


def test_padding_rows_are_inert(case):
    whole = case.run(16)
    saved = case.ids[11:16].clone()
    case.ids[11:16] = -1
    padded = case.run(16)
    case.ids[11:16] = saved
    assert torch.equal(padded[:11], whole[:11])
    assert torch.equal(case.run(16), whole)


@pytest.mark.parametrize("rows", [1, 16])
def test_parts_add_up_to_the_sum(case, rows):
    total = torch.zeros(rows, WIDTH, device="cuda")
    for part in case.run(rows, in_parts=True):
        total += part
    assert torch.equal(total, case.run(rows))


def test_one_expert_takes_all_rows(case):
    saved = case.ids[:64].clone()
    case.ids[:64] = -1
    case.ids[:64, 2] = 7
    expected = case.expected(64)
    actual = case.run(64)
    case.ids[:64] = saved
    assert (actual - expected).norm() < 1e-2 * expected.norm()
