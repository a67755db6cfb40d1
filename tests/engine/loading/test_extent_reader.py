import errno
import os
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loading import extent_reader
from engine.loading.extent_reader import ALIGNMENT, Extent, ExtentReader, FileChangedError, plan_spans
from engine.loading.read_way import ReadWay


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("extents")
    found = []
    for number, size in enumerate((0, 1, 4095, 70_001, 300_000)):
        file = folder / f"{number}.bin"
        file.write_bytes(os.urandom(size))
        found.append(file)
    return found


def extents_of(files, data) -> list[Extent]:
    found = []
    for _ in range(data.draw(st.integers(0, 12))):
        file = data.draw(st.sampled_from(files))
        size = file.stat().st_size
        offset = data.draw(st.integers(0, size))
        found.append(Extent(file, offset, data.draw(st.integers(0, size - offset))))
    return found


class Direct(ReadWay):
    """Never through the page cache."""

    def __init__(self):
        super().__init__(0)

    def is_direct(self, size: int) -> bool:
        return True


def bytes_of(reader) -> list[tuple[Extent, bytes]]:
    """Each extent that comes, with its bytes."""
    found = []
    for span, bytes_B in reader:
        assert bytes_B.numel() == span.size
        for extent in span.extents:
            begin = extent.offset - span.start
            found.append((extent, bytes(bytes_B[begin : begin + extent.size].numpy())))
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_extent_comes_once_with_its_bytes(files, data):
    """Whatever overlaps, touches, is empty or is longer than a span or the ring, with and without the page cache."""
    extents = extents_of(files, data)
    options = {
        "num_threads": data.draw(st.integers(1, 3)),
        "span_bytes": data.draw(st.sampled_from([1, 8192, 100_000])),
        "ring_bytes": data.draw(st.sampled_from([1, 20_000, 10**6])),
        "way": data.draw(st.sampled_from([None, Direct()])),
    }
    spans = plan_spans(extents, options["span_bytes"])
    seen = []
    for extent, content in bytes_of(ExtentReader(spans, **options)):
        assert content == extent.file.read_bytes()[extent.offset : extent.stop]
        seen.append(extent)
    assert sorted(seen) == sorted(extents)
    assert seen == [extent for span in spans for extent in span.extents]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_spans_are_aligned_and_read_nothing_twice(files, data):
    extents = extents_of(files, data)
    spans = plan_spans(extents, 8192)
    for span in spans:
        assert span.start % ALIGNMENT == span.stop % ALIGNMENT == 0
        assert all(span.start <= e.offset and e.stop <= span.stop for e in span.extents)
        assert span.size <= 8192 or len(span.extents) == 1 or max(e.size for e in span.extents) > 8192 - 2 * ALIGNMENT


def test_neighbours_are_one_read_and_far_ones_are_not(files):
    file = files[-1]
    near = [Extent(file, 0, 100), Extent(file, 5_000, 100), Extent(file, 100, 4_900)]
    assert [(span.start, span.stop) for span in plan_spans(near)] == [(0, 8192)]
    far = Extent(file, 8192 + extent_reader.MOST_SKIPPED + 1, 10)
    assert len(plan_spans([*near, far])) == 2


def test_a_file_cut_meanwhile_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(50_000))
    with pytest.raises(FileChangedError, match=r"model\.safetensors ends at byte 50000"):
        list(ExtentReader(plan_spans([Extent(file, 0, 50_001)])))
    with pytest.raises(FileNotFoundError):
        list(ExtentReader(plan_spans([Extent(tmp_path / "gone", 0, 1)])))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]


def test_leaving_early_ends_threads_and_files(files):
    extents = [Extent(files[-1], i * 1000, 1000) for i in range(200)]
    reader = ExtentReader(plan_spans(extents, 8192), span_bytes=8192, ring_bytes=16384)
    for _ in reader:
        break
    del reader
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]


def test_who_leaves_does_not_wait_for_a_disk_that_stands_still(files, monkeypatch):
    """The reads under way end when they may, and with the last the files are closed."""
    gate, reads, closed, close = threading.Event(), os.preadv, [], os.close
    monkeypatch.setattr(extent_reader, "LEAVING_SECONDS", 0.0)
    monkeypatch.setattr(os, "preadv", lambda *rest: (rest[2] >= 8192 and gate.wait(30)) * 0 + reads(*rest))
    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    extents = [Extent(files[-1], i * 8192, 8192) for i in range(20)]
    reader = ExtentReader(plan_spans(extents, 8192), num_threads=2, span_bytes=8192, ring_bytes=4 * 8192)
    for _ in reader:
        break
    stuck = [thread for thread in threading.enumerate() if thread.name.startswith("reader-")]
    assert stuck and not closed
    gate.set()
    for thread in stuck:
        thread.join(30)
    assert len(closed) == 1


def sizes_of_buffers(monkeypatch) -> list[int]:
    """Of those that readers make from now on."""
    sizes = []
    buffer = extent_reader._Buffer

    class Counted(buffer):
        def __init__(self, size, pinned):
            super().__init__(size, pinned)
            sizes.append(size)

    monkeypatch.setattr(extent_reader, "_Buffer", Counted)
    return sizes


def test_no_more_than_the_ring_is_held(files, monkeypatch):
    sizes = sizes_of_buffers(monkeypatch)
    extents = [Extent(files[-1], i * 8192, 8192) for i in range(30)]
    assert len(list(ExtentReader(plan_spans(extents, 8192), span_bytes=8192, ring_bytes=3 * 8192))) == 30
    assert sizes == [8192] * 3


def opened_flags(monkeypatch) -> list[int]:
    """Flags of every file that is opened from now on."""
    flags, opens = [], os.open
    monkeypatch.setattr(os, "open", lambda file, how, *rest: flags.append(how) or opens(file, how, *rest))
    return flags


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize(
    ("cached", "is_common", "is_direct"), [(0, False, True), (None, False, True), (74, False, False), (0, True, False)]
)
def test_past_the_page_cache_what_is_not_there_and_nobody_else_reads(files, monkeypatch, cached, is_common, is_direct):
    """74 pages are the whole file; None: the kernel does not say."""
    monkeypatch.setattr(extent_reader.page_cache, "cached_pages", lambda *_: cached)
    flags = opened_flags(monkeypatch)
    spans = [replace(span, is_common=is_common) for span in plan_spans([Extent(files[-1], 5, 299_995)])]
    ((extent, content),) = bytes_of(ExtentReader(spans, way=Direct()))
    assert content == files[-1].read_bytes()[5:] and extent.size == 299_995
    assert any(how & os.O_DIRECT for how in flags) == is_direct


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_a_direct_read_that_is_refused_goes_through_the_page_cache(files, monkeypatch, number):
    direct, opens, reads = set(), os.open, os.preadv

    def open_(file, how, *rest):
        descriptor = opens(file, how & ~os.O_DIRECT, *rest)
        if how & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def preadv(descriptor, *rest):
        if descriptor in direct:
            raise OSError(number, os.strerror(number))
        return reads(descriptor, *rest)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(extent_reader.page_cache, "cached_pages", lambda *_: 0)
    way = Direct()
    ((_, content),) = bytes_of(ExtentReader(plan_spans([Extent(files[-1], 0, 300_000)]), way=way))
    assert direct and content == files[-1].read_bytes()
    way.tell(False, 1, 1.0)
    way.tell(True, 1, 2.0)
    assert not way.direct_is_faster, "a read that was refused, if quickly, says nothing about the way"


def test_long_spans_share_buffers_too(files, monkeypatch):
    sizes = sizes_of_buffers(monkeypatch)
    extents = [Extent(files[-1], i * 12_288, 12_288) for i in range(20)]
    reader = ExtentReader(plan_spans(extents, 8192), span_bytes=8192, ring_bytes=4 * 8192)
    assert len(list(reader)) == 20 and sizes == [16_384] * 2


def test_a_buffer_waits_for_who_still_reads_it(files):
    extents = [Extent(files[-1], i * 8192, 8192) for i in range(6)]
    reader = ExtentReader(plan_spans(extents, 8192), num_threads=1, span_bytes=8192, ring_bytes=2 * 8192)
    waited = []
    for number, _ in enumerate(reader):
        reader.release_with(lambda number=number: waited.append(number))
        assert waited == list(range(max(number - 1, 0))), "a span is read again only after the one before was released"
    assert waited == [0, 1, 2, 3]
