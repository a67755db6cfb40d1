"""Reading together: the plan that all ranks make alike, and the values, which are those of each reading for itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
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

    def gather(self, rank: int) -> Gather:
        return Gather(rank, len(self._pieces), lambda piece_B: self._run(rank, piece_B))

    def _run(self, rank: int, piece_B: torch.Tensor) -> torch.Tensor:
        self._pieces[rank] = piece_B.clone()
        self._barrier.wait()
        stack = torch.stack(self._pieces)
        self._barrier.wait()
        return stack


@st.composite
def worlds(draw, widths: tuple[int, ...]) -> tuple[int, list[list[Wish]]]:
    """Number of ranks, and what each of them wants of some files, in an order of its own: a share of the rows, or the
    same rows as all with some of the columns. widths: columns of a tensor."""
    num_ranks = draw(st.sampled_from([2, 3, 4, 8]))
    ranks: list[list[Wish]] = [[] for _ in range(num_ranks)]
    for file in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, 9000))
        for i in range(draw(st.integers(1, 5))):
            dtype = draw(st.sampled_from(["BF16", "F32", "I32", "U8"]))
            rows, columns = draw(st.integers(0, 9)), draw(st.sampled_from(widths))
            header = TensorHeader(Path(f"{file}"), dtype, (rows, columns), start)
            start += rows * columns * TYPES[dtype].itemsize + draw(st.sampled_from([0, 0, 2, 5000]))
            is_shared, on_host = draw(st.booleans()), draw(st.integers(0, 9)) == 0
            for rank in range(num_ranks):
                own_rows = WHOLE if is_shared else slice(rows * rank // num_ranks, rows * (rank + 1) // num_ranks)
                part = (own_rows, slice(columns * rank // num_ranks, columns * (rank + 1) // num_ranks))
                ranks[rank].append(Wish(f"{file}.{i}", header, part, on_host, is_shared))
    return num_ranks, [draw(st.permutations(wishes)) for wishes in ranks]


@settings(max_examples=100, deadline=None)
@given(worlds((0, 1, 5, 700, 30000, 3000000)))
def test_all_ranks_plan_the_same_batches_and_cut_them_without_gap(world):
    """Every byte that all want is read by one rank, pieces differ by a page at most, and the rest is left alone."""
    num_ranks, ranks = world
    plans = [shared_reads.plan(wishes, num_ranks) for wishes in ranks]
    batches = [[batch for step in steps for batch in step.batches] for steps in plans]
    views = [[[(w.name, at) for w, at in batch.places] + [batch.piece] for batch in found] for found in batches]
    assert all(view == views[0] for view in views)
    for wishes, steps in zip(ranks, plans, strict=True):
        own = sorted(wish.name for step in steps for wish in step.own)
        assert own == sorted(wish.name for wish in wishes if wish.on_host or not wish.is_everywhere)
    placed = [wish.name for batch in batches[0] for wish, _ in batch.places]
    assert sorted(placed) == sorted(wish.name for wish in ranks[0] if wish.is_everywhere and not wish.on_host)
    for batch in batches[0]:
        check_cuts(batch, num_ranks)


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
    num_ranks, ranks = world
    folder = tmp_path_factory.mktemp("files")
    ranks = [[wish._replace(header=in_folder(wish.header, folder)) for wish in wishes] for wishes in ranks]
    generator = torch.Generator().manual_seed(seed)
    for file in {wish.header.file for wish in ranks[0]}:
        size = max(wish.extent.stop for wishes in ranks for wish in wishes if wish.header.file == file)
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tofile(file)
    table = Table(num_ranks)

    def read(rank: int) -> dict[str, torch.Tensor]:
        found = shared_reads.read(ranks[rank], CPU, table.gather(rank))
        return {wish.name: value.clone() for wish, value in found}

    with ThreadPoolExecutor(num_ranks) as pool, mock.patch.object(shared_reads, "BATCH_BYTES", 100_000):
        together = list(pool.map(read, range(num_ranks)))
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


def load_both_ways(parallel: ParallelState, directory: str, moe_comm: str) -> tuple[bool, int]:
    """Whether all parameters are the same, and how many collectives loading together took."""
    alone = load(parallel, directory, None, moe_comm=moe_comm)
    before = parallel.meter.calls
    together = load(parallel, directory, Gather.over(parallel), moe_comm=moe_comm)
    same = alone.keys() == together.keys() and all(torch.equal(alone[name], together[name]) for name in alone)
    return same and any(value.any() for value in alone.values()), parallel.meter.calls - before


@pytest.mark.parametrize(("tp", "ep", "moe_comm"), [(2, 1, "auto"), (2, 2, "nccl_a2a"), (4, 2, "auto"), (4, 4, "auto")])
def test_ranks_that_read_together_hold_the_same_parameters(small, tmp_path, tp, ep, moe_comm):
    found = on_ranks(tp, tmp_path, load_both_ways, str(small), moe_comm, ep=ep)
    assert all(same for same, _ in found)
    assert found[0][1] > 0 and len({calls for _, calls in found}) == 1


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
