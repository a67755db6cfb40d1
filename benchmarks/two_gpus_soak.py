"""Many replays of every dispatcher's verbs with rows, routing and skew drawn anew each time, each held against sums in
float64, and the ranks' bits against each other's now and then.

Shape letters as in engine/comm/dispatcher.py, P ranks, S drawn inputs of a size.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from engine.comm.collectives import agree_on_minimum, all_gather
from engine.comm.dispatcher import DispatchLimits, DispatchOutput, TokenDispatcher, build
from engine.comm.parallel_state import ParallelState
from engine.graph import CudaRecorder
from engine.kernels import table as kernel_table
from engine.layers.norm import RMSNorm

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.06}  # of normed values, times 1 + theirs; a lost row is off by 1
EPS = 1e-6
DRAWN = 32
ROUND = 500  # replays between looks at the other ranks
SKEW_CYCLES = 100_000  # of a rank that is late, every eighth time, at most
WARM_UPS = 2


@torch.inference_mode()
def soak_of_rank(
    parallel: ParallelState, dispatcher: str, replays: int, sizes: list[int], width: int, num_experts: int,
    top_k: int, dtype: str, seconds: float, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Replays, until there were as many or the time is over; what was wrong in them."""
    limits = DispatchLimits(num_experts, width, top_k, max(sizes), getattr(torch, dtype))
    built = build(dispatcher, parallel, limits)
    steps = [_Step(built, parallel, limits, size, seed + size) for size in sizes]
    draw, skew = random.Random(seed), random.Random(seed + 1 + parallel.rank)
    started, done, unequal = time.monotonic(), 0, 0
    late = parallel.device.type == "cuda"
    while done < replays and _all_have_time(started, seconds, parallel):
        for _ in range(min(ROUND, replays - done)):
            step = draw.choice(steps)
            step.load(draw.randrange(DRAWN))
            if late and not skew.randrange(8):
                torch.cuda._sleep(skew.randrange(SKEW_CYCLES))
            step.replay()
            step.check()
            done += 1
        unequal += not _same_bits(step.output_TD[: step.num_real], parallel)
    wrong = sum(int(step.wrong_1) for step in steps)
    result = {
        "passed": done == replays and not wrong and not unequal and built.failure() is None,
        "failure": built.failure(),
        "replays": done,
        "wrong": wrong,
        "looks_with_unequal_bits": unequal,
        "captured": steps[0].graph is not None,
        "real_rows_of_sizes": {step.size: [min(step.real_S), max(step.real_S)] for step in steps},
        "seconds": time.monotonic() - started,
    }
    del step, steps
    built.close()
    return result


def _all_have_time(started: float, seconds: float, parallel: ParallelState) -> bool:
    return bool(agree_on_minimum(int(time.monotonic() - started < seconds), parallel))


def _same_bits(x_TD: torch.Tensor, parallel: ParallelState) -> bool:
    everyone_PTD, _ = all_gather(x_TD.contiguous(), parallel)
    return all(torch.equal(one_TD, everyone_PTD[0]) for one_TD in everyone_PTD)


class _Step:
    """A step of `size` rows: inputs in fixed places, drawn ones to put there with what should come out, and a graph
    where the dispatcher may be captured."""

    def __init__(
        self, dispatcher: TokenDispatcher, parallel: ParallelState, limits: DispatchLimits, size: int, seed: int
    ):
        self.dispatcher, self.parallel, self.limits, self.size = dispatcher, parallel, limits, size
        device = parallel.device
        kernels = kernel_table.KERNELS[kernel_table.choose(device, limits.dtype)]()
        self.norm = RMSNorm(limits.width, EPS, limits.dtype, device, kernels)
        self.norm.weight.fill_(1)
        self._draw(torch.Generator(device).manual_seed(seed))
        self.wrong_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.now = {name: drawn[0].clone() for name, drawn in self.drawn.items()}
        self.load(0)
        for _ in range(WARM_UPS):
            self.output_TD = self._run()
        self.graph = None
        if device.type == "cuda" and dispatcher.is_capturable:
            self.graph, self.output_TD = CudaRecorder(device).capture(self._run)

    def load(self, index: int) -> None:
        for name, drawn in self.drawn.items():
            self.now[name].copy_(drawn[index])
        self.index, self.num_real = index, self.real_S[index]

    def replay(self) -> None:
        if self.graph is None:
            self.output_TD = self._run()
        else:
            self.graph.replay()

    def check(self) -> None:
        """Counts a replay as wrong on the device, NaN included."""
        expected_TD = self.expected_STD[self.index][: self.num_real]
        error_TD = (self.output_TD[: self.num_real].float() - expected_TD).abs() / (1 + expected_TD.abs())
        self.wrong_1 += ~(error_TD <= TOLERANCE[self.limits.dtype]).all()

    def _run(self) -> torch.Tensor:
        now, dispatcher = self.now, self.dispatcher
        _, residual_tD = dispatcher.enter(now["x_TD"], self.norm)
        x_tD, residual_tD = dispatcher.reduce(now["partial_TD"], residual_tD, self.norm)
        ids_tK, weights_tK = self._held(dispatcher.num_held(now["num_tokens_1"]), x_tD.shape[0])
        sent = dispatcher.dispatch(x_tD, ids_tK, weights_tK)
        return dispatcher.combine(self._experts(sent), sent.handle, residual_tD, self.norm)[0]

    def _experts(self, sent: DispatchOutput) -> torch.Tensor:
        """An expert multiplies each column by a number of its own, so that the norm hides nothing of it; of sliced
        experts every rank gives an equal part."""
        held = self.parallel.expert_range(self.limits.num_experts)
        here_RK = sent.expert_ids_RK >= 0
        scales_RKD = self.scales_ED[held.start : held.stop][sent.expert_ids_RK.clamp(0).long()]
        weights_RK1 = torch.where(here_RK, sent.weights_RK, 0).unsqueeze(-1) / self.parallel.expert_tp
        partial_RD = sent.x_RD.float() * (scales_RKD * weights_RK1).sum(1)
        return torch.where(here_RK.any(-1, keepdim=True), partial_RD, 0).to(self.limits.dtype)

    def _held(self, num_held_1: torch.Tensor, held: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Routing of the rows this rank holds, as its router would hand it over."""
        local = self.dispatcher.local_experts
        first = self.parallel.rank * held if self.dispatcher.shards_tokens else 0
        ids_tK = self.now["ids_TK"][first : first + held] - local.start
        rows_t1 = torch.arange(held, device=ids_tK.device).unsqueeze(1)
        elsewhere = (ids_tK < 0) | (ids_tK >= len(local)) | (rows_t1 >= num_held_1)
        return ids_tK.masked_fill(elsewhere, -1), self.now["weights_TK"][first : first + held]

    def _draw(self, generator: torch.Generator) -> None:
        """The same on every rank. Routing is drawn for as many rows as all ranks' shares have."""
        ranks, device, dtype = self.parallel.tp, self.parallel.device, self.limits.dtype
        rows, padded = self.size, -(-self.size // ranks) * ranks

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.scales_ED = normal(self.limits.num_experts, self.limits.width)
        x_STD = normal(DRAWN, rows, self.limits.width).to(dtype)
        partials_SPTD = (normal(DRAWN, ranks, rows, self.limits.width) / ranks**0.5).to(dtype)
        ids_STK = normal(DRAWN, padded, self.limits.num_experts).topk(self.limits.top_k).indices
        weights_STK = normal(DRAWN, padded, self.limits.top_k).softmax(-1)
        real_S1 = torch.randint(1, rows + 1, (DRAWN, 1), generator=generator, device=device)
        self.real_S = real_S1.flatten().tolist()
        self.drawn = {
            "x_TD": x_STD,
            "partial_TD": partials_SPTD[:, self.parallel.rank].contiguous(),
            "ids_TK": ids_STK.int(),
            "weights_TK": weights_STK,
            "num_tokens_1": real_S1.int(),
        }
        residual = x_STD.double() + partials_SPTD.double().sum(1)
        factors = [
            (self.scales_ED[ids_TK].double() * weights_TK.double().unsqueeze(-1)).sum(1)
            for ids_TK, weights_TK in zip(ids_STK[:, :rows], weights_STK[:, :rows], strict=True)
        ]
        self.expected_STD = _norm(residual + _norm(residual) * torch.stack(factors)).float()


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
