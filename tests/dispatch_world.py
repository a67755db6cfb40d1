"""A small model between embeddings and logits, run by any number of ranks through any dispatcher.

Every rank draws the same checkpoint from a seed and takes its share of it, as the real layers do.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from engine.batch import ForwardBatch
from engine.comm.dispatcher import DISPATCHERS, DispatchLimits, build
from engine.comm.parallel_state import ParallelState
from engine.kernels.reference import add_parts
from engine.kernels.reference_kernels import ReferenceKernels
from engine.layers.linear import Linear, whole
from engine.layers.moe import DenseFeedForward, MoEFeedForward, Router
from engine.layers.quant import FloatExperts
from tests import library_stand_ins

WIDTH, INNER, EXPERTS, TOP, HEADS = 24, 32, 8, 3, 8
NUM_DENSE, NUM_MOE = 1, 2
NUM_LAYERS = NUM_DENSE + NUM_MOE
SPARE = 9  # rows that a dispatcher has room for and no step fills
PLAIN = [name for name in DISPATCHERS if name not in ("deepep", "nccl_ep")]  # the others need a library and GPUs
LIMIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Case:
    """routing: "any"; "few" where a bias sends nearly all rows to the same experts, "same" where it sends all. The
    last `padding` of the num_tokens rows are padding."""

    dispatcher: str
    ep: int
    num_tokens: int
    routing: str = "any"
    dtype: torch.dtype = torch.float32
    padding: int = 0
    heads: int = HEADS

    @property
    def num_real(self) -> int:
        return self.num_tokens - self.padding

    @property
    def in_parts(self) -> bool:
        """Whether partials come in parts that are still to be added: in every other case."""
        return self.num_tokens % 2 == 1


@dataclass
class Outcome:
    """What one rank saw: the output, the rows and experts it was given, what it sent, and for the rows it routed the
    least distance between the last expert chosen and the first one not."""

    x: torch.Tensor
    num_pairs: int
    load: torch.Tensor
    rounds: dict[str, int]
    bytes: dict[str, int]
    margin: torch.Tensor | None = None


class _Draw:
    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) / shape[-1] ** 0.5


class PlainNorm:
    """RMSNorm without a weight, alone or after the residual sum."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    def add(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = add_parts(partial) if partial.dim() == 3 else partial
        total = residual + whole.to(residual.dtype)
        return self(total), total


norm = PlainNorm()


def batch_of(num_tokens: int, dispatcher) -> ForwardBatch:
    """What a feed-forward block reads of a step whose first num_tokens rows are real."""
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(nothing, nothing, nothing, nothing, [], [], dispatcher, num_tokens_1=torch.tensor([num_tokens]))


def shared_down(inner: int, width: int, columns: slice, dtype: torch.dtype) -> Linear:
    return Linear(inner, {"shared_experts.down_proj": whole(width)}, dtype, torch.device("cpu"), columns)


class PartsKernels(ReferenceKernels):
    """Leaves split sums in two parts, as kernels do."""

    def partial(self, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        half = x_TI.shape[1] // 2
        pairs = ((x_TI[:, :half], weight_OI[:, :half]), (x_TI[:, half:], weight_OI[:, half:]))
        return torch.stack([x.float() @ weight.float().t() for x, weight in pairs])


def _files(layer: int) -> dict[str, torch.Tensor]:
    draw, files = _Draw(100 + layer), {}
    for name in [f"experts.{e}." for e in range(EXPERTS)] + ["shared_experts.", ""]:
        files[f"{name}gate_proj.weight"], files[f"{name}up_proj.weight"] = draw(INNER, WIDTH), draw(INNER, WIDTH)
        files[f"{name}down_proj.weight"] = draw(WIDTH, INNER)
    files["gate.weight"], files["gate.e_score_correction_bias"] = draw(EXPERTS, WIDTH) * 4, draw(EXPERTS)
    return files


def _feed_forward(layer: int, case: Case, parallel: ParallelState, shards_tokens: bool) -> nn.Module:
    if layer < NUM_DENSE:
        kernels = PartsKernels() if case.in_parts else ReferenceKernels()
        module = DenseFeedForward(WIDTH, INNER, parallel, case.dtype, kernels)
    else:
        columns = slice(0, INNER) if shards_tokens else parallel.split(INNER, "columns")
        kernels, shared = ReferenceKernels(), (INNER, columns)
        module = MoEFeedForward(
            Router(WIDTH, EXPERTS, TOP, True, 2.0, shared, case.dtype, parallel.device, kernels),
            FloatExperts(EXPERTS, WIDTH, INNER, parallel, case.dtype),
            shared_down(INNER, WIDTH, columns, case.dtype),
            not shards_tokens,
            kernels,
        )
    files = _files(layer)
    for name, spec in module.specs("").items():
        if spec.part is not None:
            spec.store(files[name][spec.part])
    if layer >= NUM_DENSE and case.routing == "same":
        module.router.bias.copy_(100.0 * (torch.arange(EXPERTS) < TOP))
    if layer >= NUM_DENSE and case.routing == "few":
        module.router.first.weight[:EXPERTS].mul_(0.4)
        module.router.bias.copy_(0.85 * (torch.arange(EXPERTS) < TOP))
    return module


class _Counting:
    """Passes a dispatcher on and notes what `dispatch` brought here."""

    def __init__(self, inner):
        self.inner, self.num_pairs, self.load = inner, 0, torch.zeros(EXPERTS)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def dispatch(self, x, ids, weights):
        sent = self.inner.dispatch(x, ids, weights)
        self.num_pairs += int((sent.expert_ids_RK >= 0).sum())
        start = self.inner.local_experts.start
        self.load += (ids[ids >= 0] + start).flatten().bincount(minlength=EXPERTS)
        return sent


def run(case: Case, rank: int = 0, tp: int = 1) -> Outcome:
    parallel = ParallelState(rank, tp, case.ep)
    limits = DispatchLimits(EXPERTS, WIDTH, TOP, case.num_tokens + SPARE, case.dtype)
    make = library_stand_ins.build if case.dispatcher in library_stand_ins.NAMES else build
    dispatcher = _Counting(make(case.dispatcher, parallel, limits))
    draw = _Draw(case.num_tokens)
    x, residual = dispatcher.enter(draw(case.num_tokens, WIDTH).to(case.dtype) * 5, norm)
    margin = torch.full((1,), float("inf"))
    heads = parallel.split(case.heads, "heads")
    for layer in range(NUM_LAYERS):
        attention = _Draw(layer)(case.heads, WIDTH, WIDTH).to(case.dtype)[heads]
        partial = torch.einsum("td,hde->te", x, attention)
        if case.in_parts:
            partial = torch.stack((0.25 * partial.float(), 0.75 * partial.float()))
        x, residual = dispatcher.reduce(partial, residual, norm)
        feed_forward = _feed_forward(layer, case, parallel, dispatcher.shards_tokens)
        if isinstance(feed_forward, MoEFeedForward):
            margin = torch.minimum(margin, _margin(feed_forward.router, x))
        x, residual = feed_forward(x, residual, batch_of(case.num_real, dispatcher), norm)
    dispatcher.close()
    assert not library_stand_ins.alive()
    return Outcome(x, dispatcher.num_pairs, dispatcher.load, parallel.meter.rounds, parallel.meter.bytes, margin)


def _margin(router: Router, x: torch.Tensor) -> torch.Tensor:
    scores = (x.float() @ router.first.weight[:EXPERTS].float().t()).sigmoid() + router.bias
    best = scores.sort(-1, descending=True).values
    return best[:, TOP - 1] - best[:, TOP]


def _rank(rank: int, tp: int, directory: str, cases: list[Case]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", tp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tp, timeout=LIMIT)
    with torch.inference_mode():
        outcomes = [run(case, rank, tp) for case in cases]
    torch.save([vars(o) for o in outcomes], f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def run_world(tp: int, directory: Path, cases: list[Case]) -> list[list[Outcome]]:
    """The outcomes of all ranks for each case, from one start of `tp` processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    ranks = [context.Process(target=_rank, args=(rank, tp, str(directory), cases)) for rank in range(tp)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(LIMIT.total_seconds() * 2)
            assert process.exitcode == 0, f"a rank of {tp} ended with {process.exitcode}"
    finally:
        for process in ranks:
            process.kill()
    by_rank = [[Outcome(**o) for o in torch.load(directory / f"{rank}.pt")] for rank in range(tp)]
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]
