"""Feed-forward blocks against the formula, on one rank and through every dispatcher."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.comm.dispatcher import DispatchLimits, build
from engine.comm.parallel_state import ParallelState
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.moe import DenseFeedForward, MoEFeedForward, Router
from engine.layers.quant import FloatExperts
from tests.dispatch_world import PLAIN, batch_of, norm, shared_down

WIDTH, INNER, EXPERTS, TOP = 16, 24, 6, 2
CPU = torch.device("cpu")
KERNELS = ReferenceKernels()
COLUMNS = slice(0, INNER)
LIMITS = DispatchLimits(EXPERTS, WIDTH, TOP, 64, torch.float32)


def fill(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def make_router(top_k: int = TOP, scale: float = 2.5, shared: bool = False, dtype=torch.float32) -> Router:
    columns = (INNER, COLUMNS) if shared else None
    return fill(Router(WIDTH, EXPERTS, top_k, True, scale, columns, dtype, CPU, KERNELS))


def rows(count: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


@pytest.mark.parametrize("sums_shared", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_experts_and_shared_expert_and_residual(name, shared, sums_shared):
    parallel = ParallelState()
    router = make_router(shared=shared)
    experts = fill(FloatExperts(EXPERTS, WIDTH, INNER, parallel, torch.float32))
    down = fill(shared_down(INNER, WIDTH, COLUMNS, torch.float32)) if shared else None
    dispatcher = build(name, parallel, LIMITS)
    x, residual = rows()
    _, residual = dispatcher.enter(residual, norm)
    block = MoEFeedForward(router, experts, down, sums_shared, KERNELS)
    got, after = block(x, residual, batch_of(len(x), dispatcher), norm)
    expected = residual.clone()
    weight = router.first.weight
    for t in range(len(x)):
        scores = (weight[:EXPERTS] @ x[t]).sigmoid()
        chosen = (scores + router.bias).topk(TOP).indices
        for e in chosen.tolist():
            gate, up = experts.gate_up[e].chunk(2)
            expected[t] += 2.5 * scores[e] / scores[chosen].sum() * swiglu(x[t], gate, up, experts.down[e])
    if down is not None:
        expected += swiglu(x, weight[EXPERTS : EXPERTS + INNER], weight[EXPERTS + INNER :], down.weight)
    assert torch.allclose(after, expected, atol=1e-4) and torch.allclose(got, norm(expected), atol=1e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_a_dense_layer_takes_the_same_way(name):
    mlp = fill(DenseFeedForward(WIDTH, INNER, ParallelState(), torch.float32, KERNELS))
    dispatcher = build(name, ParallelState(), LIMITS)
    x, residual = rows()
    _, residual = dispatcher.enter(residual, norm)
    got, after = mlp(x, residual, batch_of(len(x), dispatcher), norm)
    expected = residual + swiglu(x, *mlp.gate_up.weight.split(mlp.gate_up.sizes), mlp.down.weight)
    assert torch.allclose(after, expected, atol=1e-5) and torch.allclose(got, norm(after), atol=1e-5)


def test_the_router_scores_in_float32():
    """Rounded to bfloat16, the sums of two rows would be equal and the bias alone would choose."""
    router = make_router(top_k=1, dtype=torch.bfloat16)
    router.first.weight.zero_()
    router.first.weight[3, 0], router.first.weight[4, 0], router.first.weight[4, 1] = 1.0, 1.0, 2**-12
    x = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
    x[0, :2] = 1
    router.bias.zero_()
    ids, weights, *_ = router(x, torch.tensor([1]), range(EXPERTS))
    assert ids.tolist() == [[4]] and weights.dtype == torch.float32


def test_ids_count_from_the_first_local_expert_and_padding_goes_nowhere():
    router = make_router()
    x, _ = rows(5)
    everywhere, *_ = router(x, torch.tensor([5]), range(EXPERTS))
    here, *_ = router(x, torch.tensor([3]), range(2, 5))
    expected = torch.where((everywhere >= 2) & (everywhere < 5), everywhere - 2, -1)
    expected[3:] = -1
    assert torch.equal(here, expected) and (expected >= 0).any()


@pytest.mark.parametrize("tp", [2, 3])
def test_sliced_columns_sum_to_the_whole(tp):
    whole = fill(DenseFeedForward(WIDTH, INNER, ParallelState(), torch.float32, KERNELS))
    gate, up = whole.gate_up.weight.split(whole.gate_up.sizes)
    files = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": whole.down.weight}
    x, residual = rows()
    total = residual.clone()
    for rank in range(tp):
        part = DenseFeedForward(WIDTH, INNER, ParallelState(rank=rank, tp=tp), torch.float32, KERNELS)
        for name, spec in part.specs("").items():
            assert tuple(files[name].shape) == spec.shape
            spec.store(files[name][spec.part])
        total += swiglu(x, *part.gate_up.weight.split(part.gate_up.sizes), part.down.weight)
    dispatcher = build("reference", ParallelState(), LIMITS)
    _, expected = whole(x, residual, batch_of(len(x), dispatcher), norm)
    assert torch.allclose(total, expected, atol=1e-5)
