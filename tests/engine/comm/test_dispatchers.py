"""Every dispatcher, on 2 and 4 ranks and all placements of experts, computes what one rank computes."""

from __future__ import annotations

import functools

import pytest
import torch

from engine.comm.dispatcher import dispatcher_class
from engine.comm.parallel_state import ParallelState
from tests.dispatch_world import NUM_DENSE, NUM_LAYERS, NUM_MOE, PLAIN, TOP, WIDTH, Case, Outcome, run, run_world

WORLDS = (2, 4)
MANY = 2304


def cases_of(tp: int) -> list[Case]:
    eps = [ep for ep in range(1, tp + 1) if tp % ep == 0]
    sizes = [(t, routing) for t in (1, 3, 8, 17) for routing in ("any", "few")]
    cases = [Case(name, ep, t, routing) for name in PLAIN for ep in eps for t, routing in sizes]
    cases += [Case(name, tp, MANY, "few") for name in PLAIN]
    cases += [Case(name, ep, 8, padding=padding) for name in PLAIN for ep in eps for padding in (5, 7)]
    return cases + [Case(name, tp, 5, "any", torch.bfloat16) for name in PLAIN]


@functools.cache
def alone(num_tokens: int, routing: str, dtype: torch.dtype) -> Outcome:
    with torch.inference_mode():
        return run(Case("reference", 1, num_tokens, routing, dtype))


@pytest.fixture(scope="module", params=WORLDS, ids=lambda tp: f"{tp} ranks")
def world(request, tmp_path_factory) -> tuple[int, list[tuple[Case, list[Outcome]]]]:
    tp = request.param
    cases = cases_of(tp)
    return tp, list(zip(cases, run_world(tp, tmp_path_factory.mktemp("world"), cases), strict=True))


def test_all_ranks_compute_what_one_rank_does(world):
    for case, outcomes in world[1]:
        expected = alone(case.num_tokens, case.routing, case.dtype)
        bound = 1e-4 if case.dtype == torch.float32 else 0.1
        for outcome in outcomes:
            assert outcome.x.shape == (case.num_tokens, WIDTH)
            real = slice(0, case.num_real)
            assert torch.allclose(outcome.x[real].float(), expected.x[real].float(), atol=bound), case


def test_all_ranks_hold_the_same_bits(world):
    """Or their routers would disagree."""
    for case, outcomes in world[1]:
        assert all(torch.equal(outcomes[0].x, o.x) for o in outcomes[1:]), case


def test_no_row_is_lost_or_computed_twice(world):
    """Each (row, expert) pair comes to the ranks of exactly one group, however uneven the routing; no padding does."""
    tp, results = world
    for case, outcomes in results:
        pairs = sum(o.num_pairs for o in outcomes)
        assert pairs == case.num_real * TOP * NUM_MOE * (tp // case.ep), case


def test_the_uneven_cases_are_uneven():
    load = alone(MANY, "few", torch.float32).load
    assert 0.95 * load.sum() <= load[:TOP].sum() < load.sum()
    assert load.sum() == MANY * TOP * NUM_MOE


def test_rounds_by_kind(world):
    """A verb is one round in any mode, so that modes can be compared."""
    for case, outcomes in world[1]:
        combine = "moe_all_reduce" if case.dispatcher == "allreduce" else "moe_combine"
        expected = {"attention_reduce": NUM_LAYERS, "moe_dispatch": NUM_MOE, combine: NUM_LAYERS}
        expected["other"] = NUM_DENSE if dispatcher_class(case.dispatcher).shards_tokens else 0
        for outcome in outcomes:
            assert {k: v for k, v in outcome.rounds.items() if v} == {k: v for k, v in expected.items() if v}, case


def test_bytes_by_kind(world):
    """Sums of rows over ranks: gathered whole, by a ring, or by one exchange and one gather of each rank's share."""
    tp, results = world
    for case, outcomes in results:
        row = WIDTH * case.dtype.itemsize
        share = -(-case.num_tokens // tp)
        whole = (tp - 1) * case.num_tokens * row
        part = (tp - 1) * share * row
        replicated = {"reference": (whole, 0, whole), "allreduce": (2 * whole // tp, 0, 2 * whole // tp)}
        sharded = (part, (tp - 1) * share * (row + 8 * TOP), 2 * part)
        replicated |= {"symm_replicated": (whole, 0, whole), "symm_scatter": (2 * part, 0, 2 * part)}
        by_name = replicated | dict.fromkeys(("nccl_agrs", "nccl_a2a", "symm_sharded"), sharded)
        reduce, dispatch, combine = by_name[case.dispatcher]
        for outcome in outcomes:
            assert outcome.bytes["attention_reduce"] == NUM_LAYERS * reduce, case
            assert outcome.bytes["moe_combine"] + outcome.bytes["moe_all_reduce"] == NUM_LAYERS * combine, case
            assert outcome.bytes["moe_dispatch"] == NUM_MOE * dispatch, case


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_one_rank_sends_nothing(name, num_tokens):
    with torch.inference_mode():
        outcome = run(Case(name, 1, num_tokens))
    assert torch.allclose(outcome.x, alone(num_tokens, "any", torch.float32).x, atol=1e-5)
    assert set(outcome.bytes.values()) == {0}


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 2), (8, 8), (8, 4)])
def test_places_cover_experts_columns_and_heads_once(tp, ep):
    ranks = [ParallelState(rank, tp, ep) for rank in range(tp)]
    held = [(e, c) for r in ranks for e in r.expert_range(16) for c in range(256)[r.expert_columns(256, 32)]]
    assert sorted(held) == [(e, c) for e in range(16) for c in range(256)]
    assert [h for r in ranks for h in range(16)[r.split(16, "heads")]] == list(range(16))


def test_uneven_places_are_refused_with_the_sum():
    with pytest.raises(ValueError, match=r"10 heads .* 10 / 4 = 2.5"):
        ParallelState(tp=4).split(10, "heads")
    with pytest.raises(ValueError, match=r"64 / 4 = 16 .* at most 2"):
        ParallelState(tp=4).expert_columns(64, 32)
