"""Exchange kernels under Triton's interpreter, in a child process that has it switched on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.triton_interpreter import INTERPRETED, allow_scalar_arrays, interpreted, run_interpreted, starts_interpreter

pytest.importorskip("triton")
from engine.bench import epilogue
from engine.bench.virtual_world import Alone, ranks_of
from engine.kernels.gpu.channel import Shape
from engine.kernels.gpu.peer import CALLS
from tests import virtual_ranks as virtual

LAST = CALLS.value - 1
if INTERPRETED:
    allow_scalar_arrays()


@starts_interpreter
def test_under_the_interpreter():
    code, said = run_interpreted(__file__)
    assert code == 0, said
    assert "passed" in said and "failed" not in said


def world(ranks: int, width: int, dtype=torch.float32, **settings) -> virtual.World:
    return virtual.World(ranks, 2 * ranks, width, dtype, "cpu", **settings)


@interpreted
@pytest.mark.parametrize(("ranks", "width", "dtype"), [(2, 1100, torch.float32), (4, 40, torch.float16)])
def test_one_shot(ranks, width, dtype):
    """Sizes go up and down, so that marks of longer calls must come back."""
    several = world(ranks, width, dtype)
    for num_rows, parts in ((1, 1), (2 * ranks, 3), (1, 2), (1, 1)):
        virtual.check_one_shot(several, num_rows, parts)
    virtual.check_no_mark_is_missing(several)


@interpreted
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize(("ranks", "width", "dtype"), [(2, 1100, torch.float16), (4, 40, torch.float32)])
def test_two_shot(ranks, width, dtype, gather):
    several = world(ranks, width, dtype)
    for num_rows, parts in ((1, 1), (ranks + 1, 3), (1, 2), (2, 1)):
        virtual.check_two_shot(several, num_rows, parts, gather)


@interpreted
def test_both_give_the_same_bits():
    one, two = world(2, 1100), world(2, 1100)
    assert torch.equal(virtual.check_one_shot(one, 3, 2), virtual.check_two_shot(two, 3, 2))


@interpreted
@pytest.mark.parametrize(("ranks", "width", "group", "top_k"), [(2, 1100, 1, 3), (4, 24, 2, 8)])
def test_dispatch_and_combine(ranks, width, group, top_k):
    several = world(ranks, width, top_k=top_k, experts=8, group=group)
    for num_rows, routing in ((1, "any"), (ranks + 1, "some"), (2, "few"), (1, "none")):
        virtual.check_dispatch_and_combine(several, num_rows, routing, 1 + num_rows % 2, num_rows > 1)


@interpreted
@pytest.mark.parametrize(
    ("ranks", "width", "inputs", "dtype"), [(2, 1100, 192, torch.float16), (4, 40, 40, torch.float32)]
)
def test_a_product_that_sends_its_tiles(ranks, width, inputs, dtype):
    """Sizes go up and down, and pairs of launches take turns with whole rounds, so that marks must come back."""
    several = world(ranks, width, dtype)
    for num_rows in (1, 2 * ranks, 1, 1):
        virtual.check_push_linear(several, num_rows, inputs)
    virtual.check_one_shot(several, 1, 2)
    virtual.check_no_mark_is_missing(several)


@interpreted
def test_a_rank_alone_is_each_of_its_peers():
    alone = Alone(Shape(4, 8, 40, torch.float32), torch.device("cpu"))
    for num_rows in (1, 3, 1, 1):
        partial, residual = torch.randn(1, num_rows, 40), torch.randn(1, num_rows, 40)
        out = torch.empty_like(residual), torch.empty_like(residual)
        virtual.launch(virtual.ch.one_shot, "cpu", out, partial, residual, torch.ones(40), virtual.EPS, alone.once)
        assert not alone.alarm.failed_V.any()
        assert torch.equal(out[1], residual + (partial + partial + partial + partial))


@interpreted
def test_rows_over_a_slow_link_arrive_and_leave_marks_behind():
    alone = Alone(Shape(4, 8, 40, torch.float32), torch.device("cpu"), link_ns=-1)  # there is no clock here
    for num_rows in (1, 3, 1, 1):
        partial, residual = torch.randn(1, num_rows, 40), torch.randn(1, num_rows, 40)
        out = torch.empty_like(residual), torch.empty_like(residual)
        args = (partial, residual, torch.ones(40), virtual.EPS, alone.once)
        virtual.ch.one_shot(*args, out=out, phases=1)
        assert (alone.room.view(torch.int32) != -(2**31)).sum() == 3 * num_rows * 40  # on their way
        alone.carry(num_rows)
        for phase in (2, 4):
            virtual.ch.one_shot(*args, out=out, phases=phase)
        assert not alone.alarm.failed_V.any()
        assert torch.equal(out[1], residual + (partial + partial + partial + partial))
        assert (alone.room.view(torch.int32) == -(2**31)).all()


@interpreted
def test_all_forms_that_the_bench_compares_give_the_same_rows():
    """A rank alone, its rows one chunk wide, runs whole rounds under the interpreter."""
    compared = epilogue.Epilogue(Alone(Shape(2, 8, 64, torch.float32), torch.device("cpu")), 3, 32)
    expected = compared.forms()["apart"](0)
    assert expected.shape == (1, 3, 64) and expected.std() > 0.5
    following = compared.with_next(compared.forms()["apart"])(0)
    assert following.shape == (1, 3, epilogue.NEXT_OUTPUTS)
    for number, (name, call) in enumerate(compared.calls().items()):
        assert torch.allclose(call(number), following if "next" in name else expected, atol=1e-4)


@interpreted
def test_a_product_that_the_channel_does_not_take():
    several = world(2, 40)
    x, weight = torch.zeros(2, 5, 16), torch.zeros(2, 40, 16)
    for bad in ((x, weight), (x[:, :1].contiguous().half(), weight.half()), (x[:, :1].contiguous(), weight[:, :8])):
        with pytest.raises(ValueError, match="up to 4 rows, 40 wide"):
            virtual.push_linear.push_linear(*bad, several.once)


@interpreted
def test_ranks_that_send_nothing_are_named_and_later_waits_end():
    """Two of four ranks run."""
    several = world(4, 24)
    two = replace(several.once, addresses_VP=several.once.addresses_VP[:2])
    partial, residual = several.draw(2, 1, 3, 24), several.draw(2, 3, 24)
    out = torch.empty_like(residual), torch.empty_like(residual)
    virtual.launch(virtual.ch.one_shot, "cpu", out, partial, residual, several.weight, virtual.EPS, two)
    assert several.alarm.late_V2P[:, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0] * 4, [0] * 4]
    assert several.alarm.failed_V.tolist() == [1, 1, 0, 0]


def begun(several: virtual.World, memory: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """[P, P]: the call that each rank has been told of by all ranks."""
    return memory[:, num_bytes - 4 * several.ranks : num_bytes].view(torch.int32)


@interpreted
@pytest.mark.parametrize("calls", [2, 3])
def test_sets_stay_in_turn_where_counting_begins_anew(calls):
    """A rank that goes alone finds marks, not rows of an earlier call."""
    several = world(2, 24)
    for _ in range(3):
        virtual.check_one_shot(several, 4)
    several.once.state[:, 0] = LAST - 2
    for _ in range(calls):
        virtual.check_one_shot(several, 4)
    partial, residual = several.draw(1, 1, 4, 24), several.draw(1, 4, 24)
    out = torch.empty_like(residual), torch.empty_like(residual)
    alone = ranks_of(several.once)[0]
    virtual.launch(virtual.ch.one_shot, "cpu", out, partial, residual, several.weight, virtual.EPS, alone)
    assert several.alarm.late_V2P[:, 0].tolist() == [[0, 1], [0, 0]]


@interpreted
def test_rows_are_dispatched_and_combined_where_counting_begins_anew():
    several = world(2, 24, top_k=3)
    shape = several.out.shape
    for _ in range(3):
        virtual.check_dispatch_and_combine(several, 4)
    for channel, memory, num_bytes in (
        (several.back, several.memory[3], shape.two_shot_bytes),
        (several.out, several.memory[4], shape.dispatch_bytes),
    ):
        assert (begun(several, memory, num_bytes) == 2).all()
        channel.state[:, 0], begun(several, memory, num_bytes)[:] = LAST - 2, LAST - 3
    for num_rows in (4, 1, 3, 4, 2):
        virtual.check_dispatch_and_combine(several, num_rows)
    assert (several.out.state[:, 0] == 2).all()


@interpreted
@pytest.mark.parametrize("calls", [7, LAST, 0])
def test_a_rank_two_calls_behind_is_waited_for(calls):
    """One that has begun the call before is not."""
    several = world(2, 24)
    told = begun(several, several.memory[2], several.local.shape.two_shot_bytes)
    partial, residual = several.draw(1, 1, 4, 24), several.draw(1, 2, 24)
    out = torch.empty_like(residual), torch.empty_like(residual)
    alone = ranks_of(several.local)[0]
    told[:] = LAST if calls == 0 else calls - 1
    late = []
    for now in (calls, 0 if calls == LAST else calls + 1):
        several.local.state[:, 0] = now
        virtual.ch.two_shot(partial, residual, several.weight, virtual.EPS, alone, 4, False, phases=1, out=out)
        late.append(several.alarm.late_V2P[0, 1].tolist())
    assert late == [[0, 0], [0, 1]]
