"""Feed-forward blocks against the formula, on one rank and through every dispatcher."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.comm.dispatcher import DISPATCHERS
from engine.comm.parallel_state import ParallelState
from engine.layers.moe import DenseFeedForward, MoEFeedForward, Router, SwiGLU
from engine.layers.quant import FloatExperts

WIDTH, INNER, EXPERTS, TOP = 16, 24, 6, 2
CPU = torch.device("cpu")


def fill(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module


def swiglu(x: torch.Tensor, mlp: SwiGLU) -> torch.Tensor:
    gate, up = mlp.gate_up.weight.split(mlp.gate_up.sizes)
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ mlp.down.weight.t()


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rows(count: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, WIDTH, generator=generator), torch.randn(count, WIDTH, generator=generator)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_experts_and_shared_expert_and_residual(name, shared):
    parallel = ParallelState()
    router = fill(Router(WIDTH, EXPERTS, TOP, True, 2.5, CPU))
    experts = fill(FloatExperts(EXPERTS, WIDTH, INNER, parallel, torch.float32))
    mlp = fill(SwiGLU(WIDTH, INNER, parallel, torch.float32)) if shared else None
    dispatcher = DISPATCHERS[name](parallel, EXPERTS)
    x, residual = rows()
    _, residual = dispatcher.enter(residual, norm)
    got, after = MoEFeedForward(router, experts, mlp)(x, residual, dispatcher, norm)
    expected = residual.clone()
    for t in range(len(x)):
        scores = (router.weight @ x[t]).sigmoid()
        chosen = (scores + router.bias).topk(TOP).indices
        for e in chosen.tolist():
            gate, up = experts.gate_up[e].chunk(2)
            out = experts.down[e] @ (F.silu(gate @ x[t]) * (up @ x[t]))
            expected[t] += 2.5 * scores[e] / scores[chosen].sum() * out
    if mlp is not None:
        expected += swiglu(x, mlp)
    assert torch.allclose(after, expected, atol=1e-4) and torch.allclose(got, norm(expected), atol=1e-4)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_dense_layer_takes_the_same_way(name):
    parallel = ParallelState()
    mlp = fill(SwiGLU(WIDTH, INNER, parallel, torch.float32))
    dispatcher = DISPATCHERS[name](parallel, EXPERTS)
    x, residual = rows()
    _, residual = dispatcher.enter(residual, norm)
    got, after = DenseFeedForward(mlp)(x, residual, dispatcher, norm)
    assert torch.allclose(after, residual + swiglu(x, mlp), atol=1e-5) and torch.allclose(got, norm(after), atol=1e-5)


def test_the_router_scores_in_float32():
    """Rounded to bfloat16, the two best scores of a row would be equal and the bias alone would choose."""
    router = Router(WIDTH, EXPERTS, 1, True, 1.0, CPU)
    router.weight[3, 0], router.weight[4, 0] = 1.0, 1.0 + 2**-12
    ids, weights = router(torch.eye(1, WIDTH, dtype=torch.bfloat16))
    assert ids.tolist() == [[4]] and weights.dtype == torch.float32


@pytest.mark.parametrize("tp", [2, 3])
def test_sliced_columns_sum_to_the_whole(tp):
    whole = fill(SwiGLU(WIDTH, INNER, ParallelState(), torch.float32))
    gate, up = whole.gate_up.weight.split(whole.gate_up.sizes)
    files = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": whole.down.weight}
    x, _ = rows()
    total = torch.zeros_like(x)
    for rank in range(tp):
        part = SwiGLU(WIDTH, INNER, ParallelState(rank=rank, tp=tp), torch.float32)
        for name, spec in part.specs("").items():
            assert tuple(files[name].shape) == spec.shape
            spec.store(files[name][spec.part])
        total += part(x)
    assert torch.allclose(total, whole(x), atol=1e-5)
