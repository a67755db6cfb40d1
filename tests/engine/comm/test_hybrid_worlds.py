"""Eight ranks in groups: each group of tp / ep ranks holds whole experts, each of its ranks a slice of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, dispatcher_class
from engine.comm.parallel_state import ParallelState
from tests.dispatch_world import EXPERTS, NUM_LAYERS, NUM_MOE, TOP, WIDTH, Case, run, run_world

TP = 8
LIMITS = DispatchLimits(EXPERTS, WIDTH, TOP, 32, torch.float32)
RUNNABLE = [n for n in DISPATCHERS if dispatcher_class(n).obstacle(ParallelState(tp=TP, ep=2), LIMITS) is None]


def run_and_check(cases: list[Case], directory: Path) -> None:
    """One rank's result on all, in the same bits; each pair computed by one group; one round of each verb a layer,
    with the dense layer's sum in its combine."""
    for case, outcomes in zip(cases, run_world(TP, directory, cases), strict=True):
        with torch.inference_mode():
            alone = run(replace(case, dispatcher="reference", ep=1)).x
        reduced = NUM_LAYERS if case.dispatcher == "allreduce" else 0
        for outcome in outcomes:
            assert torch.allclose(outcome.x, alone, atol=1e-4), case
            assert torch.equal(outcome.x, outcomes[0].x), case
            rounds = outcome.rounds
            assert (rounds["attention_reduce"], rounds["moe_dispatch"]) == (NUM_LAYERS, NUM_MOE), case
            assert (rounds["moe_combine"], rounds["moe_all_reduce"]) == (NUM_LAYERS - reduced, reduced), case
        pairs = sum(o.num_pairs for o in outcomes)
        assert pairs == case.num_tokens * TOP * NUM_MOE * (TP // case.ep), case


def test_the_table_has_dispatchers_that_run_here():
    assert {"reference", "allreduce", "nccl_a2a"} <= set(RUNNABLE)


def test_two_groups_of_four_slices(tmp_path):
    """With fewer rows than ranks, too."""
    run_and_check([Case(name, 2, t, heads=TP) for name in RUNNABLE for t in (3, 9)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_every_grouping_of_eight_ranks(tmp_path, ep):
    routings = ("any", "few")
    run_and_check([Case(n, ep, t, r, heads=TP) for n in RUNNABLE for t in (1, 8, 17, 64) for r in routings], tmp_path)
