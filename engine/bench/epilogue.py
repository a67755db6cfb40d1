"""The epilogue form of a round, whose product sends its own tiles, against a product and a round apart.

Weights are cold: rounds of a graph take turns among more of them than a cache holds. Two worlds on one GPU: all P ranks
in one launch, and one rank that has the GPU to itself and is each of its own peers; its links may be given a delay, so
that there is something to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.bench.gpu_timing import time_calls
from engine.bench.virtual_world import Alone, VirtualWorld
from engine.kernels.gpu import channel as kernels
from engine.kernels.gpu import dense, push_linear
from engine.kernels.gpu.channel import Shape

EPS = 1e-5
ROUNDS = 30  # in one graph
COLD_BYTES = 200 * 10**6  # of weights that take turns; an H200's cache holds 50 MB
NEXT_OUTPUTS = 288  # of the next product of a rank: 4.1 MB at K2.5's width
LINK_NS = 2000
ROWS, INPUTS = (1, 4, 8, 16, 64), (256, 1024)
LINK_ROWS = 16  # more would leave no room for the kernels that the links serve


class Epilogue:
    """Products of `inputs` inputs of each rank and their round, by one form or the other."""

    def __init__(self, world: VirtualWorld | Alone, num_rows: int, inputs: int):
        self.world, self.channel, self.shape = world, world.once, world.shape  # the world holds the memory
        self.generator = torch.Generator(world.device).manual_seed(num_rows)
        launched, width = self.channel.launched, self.shape.width
        self.x = self._draw(launched, num_rows, inputs)
        self.residual = self._draw(launched, num_rows, width)
        self.norm_weight = torch.ones_like(self.residual[0, 0])
        self.weights = self._cold(launched, width, inputs)
        self.next_weights = self._cold(launched, NEXT_OUTPUTS, width)
        device = world.device
        self.tile = dense.choose_tile(width, inputs, device)
        self.next_tile = dense.choose_tile(launched * NEXT_OUTPUTS, width, device)

    def _draw(self, *shape: int) -> torch.Tensor:
        rows = torch.randn(*shape, generator=self.generator, device=self.channel.state.device)
        return rows.to(self.shape.dtype)

    def _cold(self, *shape: int) -> list[torch.Tensor]:
        one = self._draw(*shape)
        return [one.clone() for _ in range(min(ROUNDS, -(-COLD_BYTES // one.nbytes)))]

    def forms(self) -> dict[str, Callable[[int], torch.Tensor]]:
        """By name, x [V, T, D] of the round of a number; several ranks' plain product is the tiles' own, written."""
        return {
            "apart": self._apart if self.channel.launched == 1 else self._written,
            "fused": lambda number: self._fused(number),
            "fused, early": lambda number: self._fused(number, early=True),
        }

    def fetching_forms(self) -> dict[str, Callable[[int], torch.Tensor]]:
        return {
            "fused, fetched": lambda number: self._fused(number, fetches=True),
            "fused, early, fetched": lambda number: self._fused(number, fetches=True, early=True),
        }

    def calls(self) -> dict[str, Callable[[int], torch.Tensor]]:
        """All forms, then all with the next product behind them."""
        forms = self.forms()
        following = {name: self.with_next(form) for name, form in (forms | self.fetching_forms()).items()}
        return forms | {f"{name}; next": call for name, call in following.items()}

    def with_next(self, form: Callable[[int], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        """The form and the product that follows it, of all launched ranks' outputs."""

        def call(number: int) -> torch.Tensor:
            weight = self._of(self.next_weights, number).flatten(0, 1)
            return dense.linear_parts(form(number)[0], weight, self.next_tile)

        return call

    @staticmethod
    def _of(copies: list[torch.Tensor], number: int) -> torch.Tensor:
        return copies[number % len(copies)]

    def _apart(self, number: int) -> torch.Tensor:
        parts = dense.linear_parts(self.x[0], self._of(self.weights, number)[0], self.tile)
        return kernels.one_shot(parts, self.residual, self.norm_weight, EPS, self.channel)[0]

    def _written(self, number: int) -> torch.Tensor:
        partial = torch.empty_like(self.residual)
        push_linear.push_linear(self.x, self._of(self.weights, number), self.channel, out_TD=partial)
        return kernels.one_shot(partial, self.residual, self.norm_weight, EPS, self.channel)[0]

    def _fused(self, number: int, fetches: bool = False, early: bool = False) -> torch.Tensor:
        return push_linear.product_and_round(
            self.x, self._of(self.weights, number), self.residual, self.norm_weight, EPS, self.channel,
            self._of(self.next_weights, number) if fetches else None, early,
        )[0]  # fmt: skip


class WaitedInVain(RuntimeError):
    """Rows did not come within the limit: kernels that wait for each other did not run at the same time."""


def measure(world: VirtualWorld | Alone, num_rows: int, inputs: int) -> dict[str, Any]:
    """Microseconds of product and round by each form, and of both with the next product after them."""
    if link_ns(world):
        load_kernels(world, num_rows, inputs)
    epilogue = Epilogue(world, num_rows, inputs)
    row: dict[str, Any] = {"ranks a launch": epilogue.channel.launched, "link us": link_ns(world) / 1000}
    row |= {"I": inputs, "T": num_rows}
    for name, call in epilogue.calls().items():
        row[name] = round(1e6 * timed(call, world, num_rows), 2)
    if world.alarm.failed_V.any():
        raise WaitedInVain(f"ranks waited in vain: {world.alarm.late_V2P.tolist()}")
    return row


def load_kernels(world: Alone, num_rows: int, inputs: int) -> None:
    """Runs each kernel once where it waits for nothing: one that waits could keep another from being loaded."""
    quick = Alone(world.shape, world.device)
    for call in Epilogue(quick, num_rows, inputs).calls().values():
        call(0)
    quick.room.zero_()
    quick.carry(num_rows)
    torch.cuda.synchronize()


def link_ns(world: VirtualWorld | Alone) -> int:
    return world.link_ns if isinstance(world, Alone) else 0


def timed(call: Callable[[int], object], world: VirtualWorld | Alone, num_rows: int) -> float:
    """Seconds of one round of a graph; links, if they have a delay, run beside it."""
    rounds = [lambda number=number: call(number) for number in range(ROUNDS)]
    if not link_ns(world):
        return time_calls(rounds, world.device, replays=20).median
    return time_calls([lambda: beside(rounds, lambda: world.carry(num_rows))], world.device, replays=20).median / ROUNDS


def beside(calls: list[Callable[[], object]], other: Callable[[], object]) -> None:
    """The calls, and as many of the other on a second stream."""
    main, second = torch.cuda.current_stream(), torch.cuda.Stream()
    second.wait_stream(main)
    with torch.cuda.stream(second):
        for _ in calls:
            other()
    for call in calls:
        call()
    main.wait_stream(second)


def measure_all(ranks: int, device: torch.device, width: int = 7168) -> list[dict[str, Any]]:
    shape = Shape(ranks, 64, width, torch.bfloat16, 8)
    worlds = Alone(shape, device), Alone(shape, device, link_ns=LINK_NS), VirtualWorld(shape, device)
    return [row for world in worlds for row in _measure_world(world)]


def _measure_world(world: VirtualWorld | Alone) -> list[dict[str, Any]]:
    """Its rows; the last one says why there are no more, where ranks waited in vain: their waits are spoilt then."""
    rows = []
    for inputs in INPUTS:
        for num_rows in ROWS:
            if num_rows > LINK_ROWS and link_ns(world):
                continue
            try:
                rows.append(measure(world, num_rows, inputs))
            except WaitedInVain as error:
                return [*rows, {"link us": link_ns(world) / 1000, "I": inputs, "T": num_rows, "failed": str(error)}]
    return rows
