"""Reading together: the plan that all ranks make alike, and the values, which are those of each reading for itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.loading import shared_reads, tensor_reader
from engine.loading.checkpoint_headers import TensorHeader
from engine.loading.extent_reader import ALIGNMENT, SPAN_BYTES
from engine.loading.shared_reads import BATCH_BYTES, Gather
from engine.loading.tensor_reader import TYPES, Wish
from engine.loading.weights import Checkpoint
from engine.model_files import ModelFiles
from engine.model_loading import load_share
from tests.checkpoints import SMALL, build_checkpoint
from tests.damage import replace
from tests.gloo_ranks import on_ranks

CPU = torch.device("cpu")
WHOLE = slice(None)


class Table:
    """Where threads that play ranks exchange their pieces."""

    def __init__(self, num_ranks: int):
        self._pieces = [torch.empty(0)] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=30)

    def gather(self, rank: int, open_group: Callable | None = None) -> Gather:
        return Gather(rank, len(self._pieces), lambda piece_B: self._run(rank, piece_B), open_group)

    def _run(self, rank: int, piece_B: torch.Tensor) -> torch.Tensor:
        self._pieces[rank] = piece_B.clone()
        self._barrier.wait()
        stack = torch.stack(self._pieces)
        self._barrier.wait()
        return stack


class Tables:
    """A table for all ranks, and one for each group of `size` of them. num_closed: exchanges of groups that ended."""

    def __init__(self, num_ranks: int, size: int):
        self._size, self.num_closed = size, 0
        self._all, self._groups = Table(num_ranks), [Table(size) for _ in range(num_ranks // size)]

    def gather(self, rank: int) -> Gather:
        return self._all.gather(rank, lambda: (self.of_group(rank), self._close))

    def of_group(self, rank: int) -> Gather:
        return self._groups[rank // self._size].gather(rank % self._size)

    def _close(self) -> None:
        self.num_closed += 1


class World(NamedTuple):
    """wishes: of each rank. group: ranks of one."""

    num_ranks: int
    group: int
    wishes: list[list[Wish]]


@st.composite
def worlds(draw, widths: tuple[int, ...]) -> World:
    """Ranks, and what each of them wants of some files, in an order of its own: a share of the rows, or some columns of
    the same rows as all or as its group, which no other wants then. widths: columns of a tensor."""
    num_ranks, group = draw(st.sampled_from([(2, 1), (3, 1), (4, 2), (8, 2), (8, 4)]))
    ranks: list[list[Wish]] = [[] for _ in range(num_ranks)]
    for file in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 9000))
        for i in range(draw(st.integers(1, 5))):
            dtype = draw(st.sampled_from(["BF16", "F32", "I32", "U8"]))
            rows, columns = draw(st.integers(0, 9)), draw(st.sampled_from(widths))
            header = TensorHeader(Path(f"{file}"), dtype, (rows, columns), start)
            start += rows * columns * TYPES[dtype].itemsize + draw(st.sampled_from([0, 0, 2, 5000]))
            on_host = draw(st.integers(0, 9)) == 0
            of = draw(st.sampled_from(["one", "all", *range(num_ranks // group if group > 1 else 0)]))
            for rank in range(num_ranks):
                own_rows = slice(rows * rank // num_ranks, rows * (rank + 1) // num_ranks) if of == "one" else WHOLE
                part = (own_rows, slice(columns * rank // num_ranks, columns * (rank + 1) // num_ranks))
                wish = Wish(f"{file}.{i}", header, part, on_host, of == "all", is_in_group=of == rank // group)
                if of in ("one", "all", rank // group):
                    ranks[rank].append(wish)
    return World(num_ranks, group, [draw(st.permutations(wishes)) for wishes in ranks])


@settings(max_examples=100, deadline=None)
@given(worlds((0, 1, 5, 700, 30000, 3000000)))
def test_ranks_plan_the_same_batches_and_cut_them_without_gap(world):
    """Every byte that all want, or all of a group, is read by one of them, pieces differ by a page at most, and the
    rest is left alone."""
    tables = Tables(world.num_ranks, world.group)
    plans = [
        shared_reads.plan(wishes, tables.gather(rank), tables.of_group(rank) if world.group > 1 else None)
        for rank, wishes in enumerate(world.wishes)
    ]
    for wishes, steps in zip(world.wishes, plans, strict=True):
        own = sorted(wish.name for step in steps for wish in step.own)
        assert own == sorted(
            wish.name for wish in wishes if wish.on_host or not (wish.is_everywhere or wish.is_in_group)
        )
    every, groups = [check_plans(plans, world.num_ranks, lambda wish: wish.is_everywhere, world.wishes)], []
    for first in range(0, world.num_ranks if world.group > 1 else 0, world.group):
        ranks = slice(first, first + world.group)
        groups.append(check_plans(plans[ranks], world.group, lambda wish: wish.is_in_group, world.wishes[ranks]))
    num_batches = sum(len(step.batches) for step in plans[0])
    assert num_batches == sum(map(len, every + groups[:1])), "and there are no others"


def check_plans(plans: list[list[shared_reads.Step]], num_ranks: int, is_theirs, wishes) -> list[shared_reads.Batch]:
    """Returns the batches of these ranks, which are the first one's."""

    def of(step: shared_reads.Step) -> list[shared_reads.Batch]:
        return [batch for gather, batch in step.batches if gather.num_ranks == num_ranks]

    batches = [[batch for step in steps for batch in of(step)] for steps in plans]
    views = [[[(w.name, at) for w, at in batch.places] + [batch.piece] for batch in found] for found in batches]
    assert all(view == views[0] for view in views)
    placed = [wish.name for batch in batches[0] for wish, _ in batch.places]
    assert sorted(placed) == sorted(wish.name for wish in wishes[0] if is_theirs(wish) and not wish.on_host)
    for batch in batches[0]:
        check_cuts(batch, num_ranks)
    return batches[0]


def check_cuts(batch: shared_reads.Batch, num_ranks: int) -> None:
    wanted = sum(wish.extent.size for wish, _ in batch.places)
    assert wanted <= BATCH_BYTES or len(batch.places) == 1
    last, end = batch.places[-1]
    even = (end + last.extent.size) / num_ranks
    assert even <= batch.piece < even + 1 + ALIGNMENT
    pieces = [batch.fragments(rank) for rank in range(num_ranks)]
    extents = [fragment.extent for fragments in pieces for fragment in fragments]
    assert all(0 < extent.size <= SPAN_BYTES - ALIGNMENT for extent in extents)
    assert sum(extent.size for extent in extents) == wanted
    starts = {(wish.extent.offset, wish.extent.stop): place for wish, place in batch.places}
    for rank, fragments in enumerate(pieces):
        for extent, at in fragments:
            begin, place = next((b, p) for (b, e), p in starts.items() if b <= extent.offset and extent.stop <= e)
            assert place + extent.offset - begin == rank * batch.piece + at
            assert at + extent.size <= batch.piece
    assert all(one.stop <= other.offset for one, other in pairwise(extents))


@settings(max_examples=25, deadline=None)
@given(world=worlds((0, 1, 5, 700, 9000)), seed=st.integers(0, 99))
def test_every_rank_gets_what_it_would_have_read_alone(tmp_path_factory, world, seed):
    folder, num_ranks = tmp_path_factory.mktemp("files"), world.num_ranks
    ranks = [[wish._replace(header=in_folder(wish.header, folder)) for wish in wishes] for wishes in world.wishes]
    generator = torch.Generator().manual_seed(seed)
    for file in {wish.header.file for wishes in ranks for wish in wishes}:
        size = max(wish.extent.stop for wishes in ranks for wish in wishes if wish.header.file == file)
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tofile(file)
    tables = Tables(num_ranks, world.group)

    def read(rank: int) -> dict[str, torch.Tensor]:
        found = shared_reads.read(ranks[rank], CPU, tables.gather(rank))
        return {wish.name: value.clone() for wish, value in found}

    with ThreadPoolExecutor(num_ranks) as pool, mock.patch.object(shared_reads, "BATCH_BYTES", 100_000):
        together = list(pool.map(read, range(num_ranks)))
    assert tables.num_closed == sum(any(wish.is_in_group for wish in wishes) for wishes in ranks)
    for wishes, found in zip(ranks, together, strict=True):
        alone = {wish.name: value.clone() for wish, value in tensor_reader.read(wishes, CPU)}
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert found[name].shape == value.shape and found[name].dtype == value.dtype
            assert torch.equal(as_bytes(found[name]), as_bytes(value)), name


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def in_folder(header: TensorHeader, folder: Path) -> TensorHeader:
    return header._replace(file=folder / header.file.name)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("small"), SMALL, quant="int4", shards=3)


def load(parallel: ParallelState, directory: str, gather: Gather | None, **settings) -> dict[str, torch.Tensor]:
    config = EngineConfig(directory, device="cpu", dtype="float32", tp=parallel.tp, ep=parallel.ep, **settings)
    with mock.patch("models.kimi_k25.weights.gather_if_faster", lambda _: gather):
        return dict(load_share(config, ModelFiles.read(config), parallel).named_parameters())


class Loads(NamedTuple):
    """Of one rank. same: whether all parameters are. position: how far loading together took its meter. together,
    alone: bytes that it read. distinct: bytes of all tensors."""

    same: bool
    position: float
    together: int
    alone: int
    distinct: int


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Bytes of the spans of each reader that is opened."""
    sizes, open_reader = [], tensor_reader.open_reader

    def count(spans, device):
        sizes.append(sum(extent.size for span in spans for extent in span.extents))
        return open_reader(spans, device)

    with mock.patch.object(tensor_reader, "open_reader", count):
        yield sizes


def load_both_ways(parallel: ParallelState, directory: str, moe_comm: str) -> tuple:
    with counted_reads() as sizes:
        alone = load(parallel, directory, None, moe_comm=moe_comm)
    before = parallel.meter.position
    with counted_reads() as sizes_together:
        together = load(parallel, directory, Gather.over(parallel), moe_comm=moe_comm)
    same = alone.keys() == together.keys() and all(torch.equal(alone[name], together[name]) for name in alone)
    same = same and any(value.any() for value in alone.values())
    headers = Checkpoint(directory).tensors.items()
    distinct = sum(Wish(name, header, (WHOLE,) * len(header.shape)).extent.size for name, header in headers)
    # The self-test's expert is read again, in three readers more.
    return tuple(Loads(same, parallel.meter.position - before, sizes_together[0], sizes[0], distinct))


@pytest.mark.parametrize(("tp", "ep", "moe_comm"), [(2, 1, "auto"), (2, 2, "nccl_a2a"), (4, 2, "auto"), (4, 4, "auto")])
def test_ranks_that_read_together_hold_the_same_parameters(small, tmp_path, tp, ep, moe_comm):
    """And each byte is read by one of them, but for the few that a rank looks at itself."""
    found = [Loads(*rank) for rank in on_ranks(tp, tmp_path, load_both_ways, str(small), moe_comm, ep=ep)]
    assert all(rank.same for rank in found)
    assert found[0].position >= 1 and len({int(rank.position) for rank in found}) == 1
    distinct, alone = found[0].distinct, sum(rank.alone for rank in found)
    assert distinct <= sum(rank.together for rank in found) < distinct + 0.02 * alone < alone


def load_damaged(parallel: ParallelState, directory: str) -> str:
    try:
        load(parallel, directory, Gather.over(parallel))
    except ValueError as error:
        return str(error)
    return "loaded"


def test_damage_that_all_ranks_read_together_is_found_by_each(tmp_path):
    (tmp_path / "model").mkdir()
    directory = build_checkpoint(tmp_path / "model", SMALL, quant="int4", shards=3)
    name, file = replace(directory, "o_proj.weight", lambda value: value.fill_(float("nan")))
    for message in on_ranks(2, tmp_path, load_damaged, str(directory)):
        assert name in message and file in message and "not a number" in message


def test_ranks_on_cpus_read_for_themselves(tmp_path):
    """Together they are on one host, whose page cache gives each byte of the disk to all of them."""
    assert on_ranks(2, tmp_path, chosen) == [None, None]
    assert shared_reads.gather_if_faster(ParallelState()) is None


def chosen(parallel: ParallelState) -> Gather | None:
    return shared_reads.gather_if_faster(parallel)
