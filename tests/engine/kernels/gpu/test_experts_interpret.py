"""The logic of the INT4 expert kernels under Triton's interpreter, in a child process that has it switched on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels import reference
from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
from tests.int4_experts import random_experts, random_routing

if INTERPRETED:
    allow_scalar_arrays()
EXPERTS, WIDTH, INNER, TOP_K, SHARED = 3, 256, 128, 2, 64


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


class Case:
    """Inputs of `rows` rows; `ids` as routed, or those given."""

    def __init__(self, rows: int, inner: int = INNER, ids: torch.Tensor | None = None):
        generator = torch.Generator().manual_seed(rows)
        self.packed = random_experts(EXPERTS, WIDTH, inner, generator)
        self.x = torch.randn(rows, WIDTH, generator=generator).bfloat16()
        self.ids, self.weights = random_routing(rows, TOP_K, EXPERTS + 2, EXPERTS, generator)
        if ids is not None:
            self.ids = ids
        self.shared_act = torch.randn(rows, SHARED, generator=generator).bfloat16()
        self.shared_down = (torch.randn(WIDTH, SHARED, generator=generator) / 8).bfloat16()

    def run(self, monkeypatch, rows: int | None = None, shared: bool = True, parts: bool = False, **settings):
        """The kernels on the first `rows` rows, everything they allocate poisoned."""
        from engine.kernels.gpu import experts, experts_plan

        def poisoned(*shape, **options) -> torch.Tensor:
            shape = shape[0] if isinstance(shape[0], tuple) else shape
            bad = float("nan") if options["dtype"].is_floating_point else 1 << 20
            return torch.full(shape, bad, **options)

        for module in (experts, experts_plan):
            monkeypatch.setattr(module.torch, "empty", poisoned)
        config = experts.choose_config(self.x.shape[0], WIDTH, INNER, 1 << 20)
        rest = (self.shared_act[:rows], self.shared_down) if shared else ()
        settings = {k: experts.Tile(*v) if isinstance(v, tuple) else v for k, v in settings.items()}
        inputs = (self.x[:rows], self.ids[:rows], self.weights[:rows])
        out = experts.int4_experts(*inputs, self.packed, *rest, config=replace(config, **settings), in_parts=parts)
        monkeypatch.undo()
        return out

    def expected(self, shared: bool = True) -> torch.Tensor:
        from engine.kernels.gpu.experts import expanded

        gate_up, down = (w.float() for w in expanded(self.packed))
        rest = (self.shared_act.float(), self.shared_down.float()) if shared else ()
        return reference.experts(self.x.float(), self.ids.long(), self.weights, gate_up, down, *rest)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@interpreted
@pytest.mark.parametrize("rows", [2, 17, 66])
def test_like_the_twin(rows, monkeypatch):
    case = Case(rows)
    assert relative_error(case.run(monkeypatch), case.expected()) < 1e-2


@interpreted
@pytest.mark.parametrize("settings", [{"splits": 1}, {"gate_up": (128, 2, 4, 1)}, {"down": (128, 2, 4, 1)}])
def test_every_way_gives_the_same(settings, monkeypatch):
    case = Case(2, inner=256)
    actual = case.run(monkeypatch, shared=False, **settings)
    assert relative_error(actual, case.expected(shared=False)) < 1e-2
    if "splits" not in settings:
        assert torch.equal(actual, case.run(monkeypatch, shared=False))


@interpreted
def test_one_expert_takes_all_rows_and_others_none(monkeypatch):
    ids = torch.full((20, TOP_K), -1, dtype=torch.int32)
    ids[:, 1] = EXPERTS - 1
    case = Case(20, ids=ids)
    assert relative_error(case.run(monkeypatch), case.expected()) < 1e-2


@interpreted
@pytest.mark.parametrize("rows", [4])
def test_padding_rows_are_zero_and_change_nothing(rows, monkeypatch):
    case = Case(rows)
    case.ids[rows - 2 :] = -1
    out = case.run(monkeypatch, shared=False)
    assert torch.equal(out[rows - 2 :], torch.zeros(2, WIDTH))
    assert torch.equal(out[: rows - 2], case.run(monkeypatch, rows=rows - 2, shared=False))


@interpreted
def test_parts_add_up_to_the_sum(monkeypatch):
    case = Case(3)
    case.ids[1] = -1
    parts = case.run(monkeypatch, parts=True)
    assert parts.shape == (TOP_K + 1, 3, WIDTH) and parts.dtype == torch.bfloat16
    total = torch.zeros(3, WIDTH)
    for part in parts:
        total += part
    assert torch.equal(total, case.run(monkeypatch))


@interpreted
@pytest.mark.parametrize("local", [EXPERTS, EXPERTS - 1])
def test_b145_the_self_test_passes_sound_kernels_and_names_a_wrong_product(monkeypatch, local):
    """With all experts here, so that rows come in parts, and with some elsewhere."""
    from engine.comm.parallel_state import ParallelState
    from engine.layers import expert_check
    from engine.layers.quant import MATRICES, PackedInt4Experts
    from tests.int4_experts import random_matrix

    experts = PackedInt4Experts(EXPERTS, WIDTH, INNER, ParallelState(), torch.bfloat16)
    experts.local, experts.in_parts = range(local), local == EXPERTS
    generator, index = torch.Generator().manual_seed(0), local - 1
    matrices = {}
    for expert in range(EXPERTS):
        for name in MATRICES:
            shape = (WIDTH, INNER) if name == "down_proj" else (INNER, WIDTH)
            packed = random_matrix(*shape, generator)
            experts._sink(name, expert)(*packed)
            if expert == index:
                matrices[name] = packed
    monkeypatch.setattr(expert_check, "ROWS", (1, 7))
    assert expert_check.largest_error(experts, index, matrices, torch.bfloat16, TOP_K) < 1e-2
    words, scales = matrices["up_proj"]
    matrices["up_proj"] = words, torch.cat((scales[:, 1:], scales[:, :1]), dim=1)
    assert expert_check.largest_error(experts, index, matrices, torch.bfloat16, TOP_K) > 0.1


@interpreted
def test_nobody_is_here(monkeypatch):
    case = Case(2, ids=torch.full((2, TOP_K), -1, dtype=torch.int32))
    assert not case.run(monkeypatch, shared=False).any()


@interpreted
@pytest.mark.parametrize(("rows", "block_rows"), [(2, 8), (9, 8), (33, 8), (33, 16), (70, 64), (100, 8)])
def test_plan_holds_every_pair_once(rows, block_rows):
    from engine.kernels.gpu.experts_plan import plan_blocks

    case = Case(rows)
    plan = plan_blocks(case.ids, case.weights, EXPERTS, block_rows)
    num_blocks = plan.num_blocks.item()
    experts, sizes = plan.block_experts[:num_blocks].tolist(), plan.block_sizes[:num_blocks].tolist()
    assert experts == sorted(experts) and min(sizes) > 0
    blocks = zip(experts, sizes, plan.rows[:num_blocks].tolist(), strict=True)
    found = sorted((s // TOP_K, e) for e, size, row in blocks for s in row[:size])
    assert found == sorted((t, e) for t, row in enumerate(case.ids.tolist()) for e in row if e >= 0)
    for token, expert in found:
        slot = token * TOP_K + sum(0 <= other < expert for other in case.ids[token].tolist())
        assert plan.slot_weights[slot] == case.weights[token][case.ids[token] == expert].item()
