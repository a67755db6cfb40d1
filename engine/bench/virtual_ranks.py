"""Rounds of P virtual ranks on one GPU: what the exchange kernels cost without links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.bench import epilogue
from engine.bench.gpu_timing import time_calls
from engine.bench.report import Report, format_table
from engine.bench.virtual_world import VirtualWorld
from engine.kernels.gpu import channel as kernels
from engine.kernels.gpu import norm
from engine.kernels.gpu.channel import Shape

EPS = 1e-5
ROUNDS = 20  # in one graph
EXPERTS = 384
ROWS = (1, 2, 4, 8, 16, 32, 64)
GOAL_RANKS = 8  # what the goals below are for: microseconds, and a ratio
ROUND_GOALS = {1: 6.0, 2: 6.0, 4: 6.0, 8: 6.0, 64: 12.0}
UNFUSED_GOAL = 1.5
SPARSE_GOAL, SPARSE_GOAL_MOST_ROWS = 10.0, 16


class Rounds:
    """Calls of one number of rows; all ranks in one launch. Inputs are random and stay the same."""

    def __init__(self, world: VirtualWorld, num_rows: int):
        self.world, self.num_rows = world, num_rows
        shape = world.shape
        self.share = -(-num_rows // shape.ranks)
        self.generator = torch.Generator(world.device).manual_seed(num_rows)
        self.weight = torch.ones(shape.width, dtype=shape.dtype, device=world.device)
        self.partial = self._rows(shape.ranks, num_rows)
        self.parts = self._rows(shape.ranks, shape.ranks * num_rows)
        self.residual = self._rows(shape.ranks, num_rows)
        self.own_residual = self._rows(shape.ranks, self.share)
        ids = torch.rand(num_rows, EXPERTS, generator=self.generator, device=world.device).argsort(1)[:, : shape.top_k]
        self.ids = torch.full((shape.ranks * self.share, shape.top_k), -1, dtype=torch.int32, device=world.device)
        self.ids[:num_rows] = ids
        self.ids = self.ids.unflatten(0, (shape.ranks, self.share))
        self.weights = torch.ones_like(self.ids, dtype=torch.float32)
        self.received = self._rows(shape.ranks, shape.ranks * self.share)

    def _rows(self, *shape: int) -> torch.Tensor:
        rows = torch.randn(*shape, self.world.shape.width, generator=self.generator, device=self.world.device)
        return rows.to(self.world.shape.dtype)

    def calls(self) -> dict[str, Callable[[], object]]:
        world = self.world
        return {
            "one-shot": lambda: kernels.one_shot(self.partial, self.residual, self.weight, EPS, world.once),
            "two-shot": lambda: kernels.two_shot(
                self.partial, self.own_residual, self.weight, EPS, world.twice, self.num_rows
            ),
            "dispatch + combine": self._sparse,
            "unfused sum, residual + norm": self._unfused,
        }

    def _sparse(self) -> None:
        world, experts = self.world, EXPERTS // self.world.shape.ranks
        _, local_ids, _ = kernels.dispatch(self.own_residual, self.ids, self.weights, world.out, self.num_rows, experts)
        kernels.combine(
            self.received, local_ids, self.ids, self.own_residual, self.own_residual, self.weight, EPS, world.back,
            self.num_rows, experts,
        )  # fmt: skip

    def _unfused(self) -> None:
        """The arithmetic alone of all ranks' rows: a sum of P parts, then residual and norm."""
        rows = self.residual.flatten(0, 1)
        norm.add_norm(norm.sum_parts(self.parts, rows.dtype), rows, self.weight, EPS)


def measure(ranks: int, num_rows: int, device: torch.device, width: int = 7168) -> dict[str, Any]:
    """Microseconds of each round, all P ranks at a time, in a CUDA graph."""
    shape = Shape(ranks, max(64, num_rows), width, torch.bfloat16, 8)
    world = VirtualWorld(shape, device)
    rounds = Rounds(world, num_rows)
    row: dict[str, Any] = {"ranks": ranks, "tokens": num_rows}
    for name, call in rounds.calls().items():
        timing = time_calls([call] * ROUNDS, device)
        row[name] = round(1e6 * timing.median, 2)
        row[f"{name} spread"] = round(timing.spread, 3)
    if world.alarm.failed_V.any():
        raise RuntimeError(f"ranks waited in vain: {world.alarm.late_V2P.tolist()}")
    return row


def report(ranks: int, device: torch.device) -> Report:
    """Rounds of 1 to 64 rows beside their goals, and the epilogue form beside the separate one."""
    measured = [measure(ranks, num_rows, device) for num_rows in ROWS]
    fused = epilogue.measure_all(ranks, device)
    notes = [
        f"us, median, all {ranks} ranks in one launch on one GPU, no links. Round: the faster of one-shot and "
        "two-shot; its goal at 64 rows is two-shot's. Unfused: sum, residual and norm of all ranks' rows alone.",
        f"\nA product of I inputs a rank and its round, cold weights ({ranks} ranks a launch, or one that is all its "
        "own peers); fused: the product sends its tiles.",
        format_table(fused),
    ]
    data = {"ranks": ranks, "measured": measured, "epilogue": fused}
    title = f"Rounds of {ranks} virtual ranks, rows of 7168 in bfloat16"
    return Report(title, [with_goals(row) for row in measured], notes, data)


def with_goals(row: dict[str, Any]) -> dict[str, Any]:
    """One row of `measure`, and what it is to reach where there is a goal: at 8 ranks."""
    num_rows, has_goals = row["tokens"], row["ranks"] == GOAL_RANKS
    fastest = min(row["one-shot"], row["two-shot"])
    unfused = row["unfused sum, residual + norm"]
    return {
        "T": num_rows,
        "one-shot": row["one-shot"],
        "two-shot": row["two-shot"],
        "round goal": ROUND_GOALS.get(num_rows) if has_goals else None,
        "unfused": unfused,
        "round / unfused": fastest / unfused,
        "ratio goal": UNFUSED_GOAL if has_goals else None,
        "dispatch + combine": row["dispatch + combine"],
        "sparse goal": SPARSE_GOAL if has_goals and num_rows <= SPARSE_GOAL_MOST_ROWS else None,
    }
