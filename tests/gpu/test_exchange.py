"""Exchange kernels of all ranks of a world on one GPU, at K2.5's width: right, alike on all ranks, in graphs."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")
from engine.bench import epilogue
from engine.bench.virtual_world import Alone, ranks_of
from engine.kernels.gpu import dense
from engine.kernels.gpu.channel import Shape
from engine.kernels.gpu.delay import delay
from engine.kernels.reference import add_norm
from tests import virtual_ranks as virtual

pytestmark = pytest.mark.gpu
WIDTH = 7168
REPLAYS = 100_000


def world(ranks: int, capacity: int = 64, dtype=torch.bfloat16, **settings) -> virtual.World:
    return virtual.World(ranks, capacity, WIDTH, dtype, "cuda", **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_of_replicated_rows(ranks, dtype):
    """Residuals to the bit; both ways give the same bits."""
    one, two, local = (world(ranks, dtype=dtype) for _ in range(3))
    for num_rows, parts in ((1, 1), (64, 4), (2, 9), (1, 1), (ranks + 1, 2), (33, 1), (3, 4), (1, 1), (1, 1)):
        x = virtual.check_one_shot(one, num_rows, parts)
        assert torch.equal(x, virtual.check_two_shot(two, num_rows, parts))
        virtual.check_two_shot(local, num_rows, parts, gather=False)
    virtual.check_no_mark_is_missing(one)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_product_that_sends_its_tiles(ranks, early):
    """All bits those of the product and the round apart, whether or not the next weight is fetched meanwhile."""
    several = world(ranks)
    next_weight = several.draw(ranks, 100, 4096).bfloat16()
    for num_rows, inputs in ((1, 256), (64, 1024), (2, 2304), (1, 256), (33, 256), (8, 1024), (1, 256), (1, 256)):
        fetched = next_weight if num_rows % 2 else None
        virtual.check_push_linear(several, num_rows, inputs, early=early, next_weight=fetched)
    virtual.check_no_mark_is_missing(several)


@pytest.mark.parametrize("link_ns", [0, 2000])
def test_a_rank_alone_gets_its_own_rows_from_all_peers(link_ns):
    """Over links with a delay too, by every form that the bench compares."""
    alone = Alone(Shape(8, 64, WIDTH, torch.bfloat16), torch.device("cuda"), link_ns=link_ns)
    if link_ns:
        epilogue.load_kernels(alone, 4, 256)
    compared = epilogue.Epilogue(alone, 4, 256)
    partial = torch.empty_like(compared.residual)
    virtual.push_linear.push_linear(compared.x, compared.weights[0], alone.once, out_TD=partial)
    eight = partial[None].expand(8, 1, 4, WIDTH)
    expected, _ = add_norm(
        virtual.expected_sum(eight, torch.bfloat16), compared.residual[0], compared.norm_weight, 1e-5
    )
    results = []
    rounds = [lambda form=form: results.append(form(0)) for form in compared.forms().values()] * 4
    torch.cuda.synchronize()
    if link_ns:
        epilogue.beside(rounds, lambda: alone.carry(4))
    else:
        for one in rounds:
            one()
    torch.cuda.synchronize()
    assert not alone.alarm.failed_V.any() and len(results) == 12
    assert all(torch.allclose(x[0].float(), expected.float(), rtol=3e-2, atol=3e-2) for x in results)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_product_that_is_written_has_the_bits_of_the_plain_one(num_rows):
    several = world(2)
    x, weight = (several.draw(2, rows, 1024).bfloat16() for rows in (num_rows, WIDTH))
    out = several.draw(2, num_rows, WIDTH).bfloat16()
    virtual.push_linear.push_linear(x, weight, several.once, dense.Tile(), out)
    assert torch.equal(out, torch.stack([dense.linear(*one) for one in zip(x, weight, strict=True)]))


@pytest.mark.parametrize(("ranks", "group"), [(2, 1), (4, 1), (8, 1), (8, 4), (4, 2), (2, 2)])
def test_dispatch_and_combine(ranks, group):
    several = world(ranks, experts=384 * group // ranks, group=group)
    for num_rows, routing in (
        (1, "any"),
        (64, "any"),
        (1, "none"),
        (ranks + 1, "some"),
        (64, "few"),
        (3, "any"),
        (16, "any"),
    ):
        virtual.check_dispatch_and_combine(several, num_rows, routing, 1 + num_rows % 2, num_rows != 3)


def test_a_rank_that_sends_nothing_is_named_in_time():
    several = world(4, limit_seconds=0.2)
    ranks = ranks_of(several.once)[:3]
    partial, residual = several.draw(3, 2, WIDTH), several.draw(3, 2, WIDTH).bfloat16()
    streams = [torch.cuda.Stream() for _ in ranks]
    torch.cuda.synchronize()
    for channel, stream, p, r in zip(ranks, streams, partial, residual, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(100):  # the first waits, the others do not
                virtual.ch.one_shot(p, r, several.weight, virtual.EPS, channel)
    torch.cuda.synchronize()
    assert several.alarm.late_V2P[:3, 0].tolist() == [[0, 0, 0, 1]] * 3


class Soak:
    """Rounds of `num_rows` rows in one graph, each rank a stream of its own that starts late by what `lateness` says,
    checked on the device against the sum that one rank computes."""

    def __init__(self, several: virtual.World, num_rows: int, kind: str, lateness: torch.Tensor, wrong: torch.Tensor):
        self.several, self.num_rows, self.kind = several, num_rows, kind
        self.lateness, self.wrong = lateness, wrong
        ranks, share = several.ranks, -(-num_rows // several.ranks)
        self.share = share
        self.partial = torch.zeros(ranks, 1, num_rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.residual = torch.zeros(num_rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.results = [self.room(rank) for rank in range(ranks)]
        self.own = [several.shares(self.residual, share)[rank].contiguous() for rank in range(ranks)]
        self.load()
        self.graph = torch.cuda.CUDAGraph()
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]
        with torch.cuda.graph(self.graph):
            self.step()

    def room(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.num_rows if self.kind == "once" else self.share
        return torch.empty_like(self.residual), self.residual.new_empty(rows, WIDTH)

    def load(self) -> None:
        """Each kernel once, all ranks in one launch: one that waits could keep another from being loaded."""
        several, ranks = self.several, self.several.ranks
        if self.kind == "once":
            everyone = self.residual.repeat(ranks, 1, 1)
            virtual.ch.one_shot(self.partial, everyone, several.weight, virtual.EPS, several.once)
        else:
            own = torch.stack(self.own)
            virtual.ch.two_shot(self.partial, own, several.weight, virtual.EPS, several.twice, self.num_rows)
        delay(self.lateness[:1])
        torch.cuda.synchronize()

    def step(self) -> None:
        self.partial.uniform_(-1, 1)
        self.residual.uniform_(-1, 1)
        main = torch.cuda.current_stream()
        results = []
        for rank, stream in enumerate(self.streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                delay(self.lateness[rank : rank + 1])
                results.append(self.rank(rank))
        for stream in self.streams:
            main.wait_stream(stream)
        expected = self.residual + virtual.expected_sum(self.partial, torch.bfloat16).bfloat16()
        for rank, (x, new) in enumerate(results):
            own = expected if self.kind == "once" else expected[rank * self.share : (rank + 1) * self.share]
            self.wrong += (new[: own.shape[0]] != own).sum() + (x != results[0][0]).sum()

    def rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        several, out = self.several, self.results[rank]
        if self.kind == "once":
            channel = ranks_of(several.once)[rank]
            return virtual.ch.one_shot(self.partial[rank], self.residual, several.weight, virtual.EPS, channel, out=out)
        self.own[rank].copy_(several.shares(self.residual, self.share)[rank])
        channel, args = ranks_of(several.twice)[rank], (several.weight, virtual.EPS)
        return virtual.ch.two_shot(self.partial[rank], self.own[rank], *args, channel, self.num_rows, out=out)


@pytest.mark.parametrize("kind", ["once", "twice"])
def test_many_replays_of_random_sizes_with_late_ranks(kind, record_property):
    """No wrong sum, no wait in vain, no mark left over."""
    several = world(4, 16)
    lateness = torch.zeros(4, dtype=torch.int64, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    soaks = [Soak(several, num_rows, kind, lateness, wrong) for num_rows in (1, 2, 5, 16)]
    choose = random.Random(3)
    for _ in range(REPLAYS):
        if choose.random() < 0.5:
            lateness.random_(0, 8000)
        choose.choice(soaks).graph.replay()
    torch.cuda.synchronize()
    several.check()
    assert wrong.item() == 0
