"""Reads byte ranges of files ahead of who takes them: several threads, large aligned reads, a bounded ring of buffers.

Knows files and bytes, nothing of tensors or checkpoints.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from engine.loading import host_memory, page_cache
from engine.loading.read_way import ReadWay

ALIGNMENT = 4096  # what O_DIRECT asks of offsets, sizes and memory on common file systems
SPAN_BYTES = 16 * 2**20
RING_BYTES = 8 * SPAN_BYTES  # so that of long spans, too, some are read ahead
PIECE_BYTES = SPAN_BYTES  # of one read: disks are faster by large ones, and several threads share a longer span
LEAVING_SECONDS = 2.0  # that whoever leaves early waits for reads under way
MOST_SKIPPED = 256 * 2**10  # reading over a gap of so much costs less than another request


class Extent(NamedTuple):
    """Bytes [offset, offset + size) of a file."""

    file: Path
    offset: int
    size: int

    @property
    def stop(self) -> int:
        return self.offset + self.size


class FileChangedError(OSError):
    """A file is shorter than it was when its extents were planned."""


@dataclass
class Span:
    """Extents that lie together in one file, read as one. `start` and `stop` are aligned."""

    extents: list[Extent]
    start: int
    stop: int
    is_common: bool = False  # other processes of this host read it too, so once through the page cache is best

    @property
    def size(self) -> int:
        return self.stop - self.start


def plan_spans(extents: Iterable[Extent], span_bytes: int = SPAN_BYTES) -> list[Span]:
    """Spans that hold all extents, each at most span_bytes long unless one extent alone is longer.

    Extents come file by file in the order in which the files appear, by offset within one; empty ones are kept.
    """
    files: dict[Path, list[Extent]] = {}
    for extent in extents:
        files.setdefault(extent.file, []).append(extent)
    spans: list[Span] = []
    for of_file in files.values():
        spans += _spans_of_file(sorted(of_file, key=lambda e: (e.offset, e.size)), span_bytes)
    return spans


def _spans_of_file(extents: list[Extent], span_bytes: int) -> list[Span]:
    spans: list[Span] = []
    for extent in extents:
        last = spans[-1] if spans else None
        stop = _up(extent.stop)
        if last is not None and extent.offset - last.stop <= MOST_SKIPPED and stop - last.start <= span_bytes:
            last.extents.append(extent)
            last.stop = max(last.stop, stop)
        else:
            spans.append(Span([extent], _down(extent.offset), max(stop, _down(extent.offset))))
    return spans


def _down(offset: int) -> int:
    return offset // ALIGNMENT * ALIGNMENT


def _up(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _nothing() -> None:
    """There is nobody to wait for."""


class _Buffer:
    """Aligned host memory. `wait` returns once nobody reads it any more."""

    def __init__(self, size: int, pinned: bool):
        self.size = size
        if pinned:
            whole = torch.empty(size, dtype=torch.uint8, pin_memory=True)  # a byte more would round up to twice as much
            if whole.data_ptr() % ALIGNMENT:
                whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            skip = -whole.data_ptr() % ALIGNMENT
            self.bytes_B = whole[skip : skip + size]
        else:
            self.bytes_B = host_memory.zeros(size)
        self.wait: Callable[[], None] = _nothing


@dataclass
class _Job:
    """One span under way."""

    span: Span
    buffer: _Buffer
    num_left: int
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


def num_reading() -> int:
    """Threads that read at once: enough to keep a fast disk busy, and no more than a small machine has cores for."""
    return min(8, max(4, (os.cpu_count() or 1) // 2))


class ExtentReader:
    """Iterates over (span, bytes uint8 [span.size]), in the order of the spans.

    The bytes of a span are valid until the next one is asked for, whose reading may overwrite them; behind its last
    extent they may be anything. Where a device copies from them meanwhile, `release_with` says how to wait for that.

    num_threads read at once; at most ring_bytes are held, or one span where that is longer. way: whether to read past
    the page cache (O_DIRECT) what is not in it already and is no common span, where the file system can; None: never.
    Raises OSError as the reads do, FileChangedError for a file that ends too early. Iterate once; leaving the iterator,
    however that happens, ends the threads.
    """

    def __init__(
        self,
        spans: Iterable[Span],
        *,
        num_threads: int | None = None,
        span_bytes: int = SPAN_BYTES,
        ring_bytes: int = RING_BYTES,
        pinned: bool = False,
        way: ReadWay | None = None,
    ):
        self._spans = list(spans)
        self.num_bytes = 0  # read so far, gaps included
        self._span_bytes, self._ring_bytes = _up(span_bytes), ring_bytes
        self._pinned, self._way = pinned, way if hasattr(os, "O_DIRECT") else None
        self._free: list[_Buffer] = []
        self._held_bytes = 0
        self._pieces: deque[tuple[_Job, int, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._files: dict[tuple[Path, bool], int] = {}
        self._last: _Buffer | None = None
        self._release: Callable[[], None] = _nothing
        self._num_working = 0
        count = num_threads or num_reading()
        self._threads = [threading.Thread(target=self._work, name=f"reader-{i}", daemon=True) for i in range(count)]

    def release_with(self, wait: Callable[[], None]) -> None:
        """The present span's buffer is used again only after `wait` has returned, e.g. an event's `synchronize`."""
        self._release = wait

    def __iter__(self) -> Iterator[tuple[Span, torch.Tensor]]:
        waiting, jobs = deque(self._spans), deque()
        for thread in self._threads:
            self._num_working += 1
            thread.start()
        try:
            while waiting or jobs:
                while waiting and self._has_room(waiting[0]):
                    jobs.append(self._start(waiting.popleft()))
                if not jobs:
                    self._give_back_last()
                    continue
                job = jobs.popleft()
                job.done.wait()
                if job.error is not None:
                    raise job.error
                self._release = _nothing
                yield job.span, job.buffer.bytes_B[: job.span.size]
                self._give_back_last()
                self._last = job.buffer
                job.buffer.wait = self._release
                if self._release is _nothing:  # no device copies from it
                    self._give_back_last()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the threads. One that a disk keeps for longer is left to itself: whoever interrupts a load need not wait
        for its disk. The last thread closes the files."""
        with self._changed:
            self._closed = True
            self._pieces.clear()
            self._changed.notify_all()
        until = time.monotonic() + LEAVING_SECONDS
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0.0))
        self._free.clear()

    def _leave(self) -> None:
        with self._changed:
            self._num_working -= 1
            if not self._num_working:
                for descriptor in self._files.values():
                    os.close(descriptor)
                self._files.clear()

    def _has_room(self, span: Span) -> bool:
        size = max(span.size, self._span_bytes)
        return self._held_bytes == 0 or self._held_bytes + size <= self._ring_bytes

    def _start(self, span: Span) -> _Job:
        job = _Job(span, self._take_buffer(span.size), -(-span.size // PIECE_BYTES))
        if not job.num_left:
            job.done.set()
            return job
        with self._changed:
            for start in range(0, span.size, PIECE_BYTES):
                self._pieces.append((job, start, min(start + PIECE_BYTES, span.size)))
            self._changed.notify_all()
        return job

    def _take_buffer(self, size: int) -> _Buffer:
        """The smallest free one that is large enough, or a new one, for which free ones go if the ring would be too
        long. Fresh memory costs more than reading into it, so those of long spans are used again too."""
        fitting = [buffer for buffer in self._free if buffer.size >= size]
        if fitting:
            buffer = min(fitting, key=lambda one: one.size)  # of equal ones the first: free for longest
            self._free.remove(buffer)
            buffer.wait()
        else:
            size = max(-(-size // self._span_bytes) * self._span_bytes, self._span_bytes)
            while self._free and self._num_owned() + size > self._ring_bytes:
                self._free.pop(0).wait()
            buffer = _Buffer(size, self._pinned)
        self._held_bytes += buffer.size
        return buffer

    def _num_owned(self) -> int:
        return self._held_bytes + sum(buffer.size for buffer in self._free)

    def _give_back_last(self) -> None:
        """The buffer before the present one: so a device has a whole span's time to copy from it."""
        buffer, self._last = self._last, None
        if buffer is not None:
            self._held_bytes -= buffer.size
            self._free.append(buffer)

    # The threads run these.
    def _work(self) -> None:
        while (piece := self._next_piece()) is not None:
            job, start, stop = piece
            try:
                self._read(job, start, stop)
            except BaseException as error:  # whatever it is, who waits for the span must hear of it
                job.error = error
            with self._changed:
                job.num_left -= 1
                self.num_bytes += stop - start
                if not job.num_left:
                    job.done.set()
        self._leave()

    def _next_piece(self) -> tuple[_Job, int, int] | None:
        with self._changed:
            while not self._pieces and not self._closed:
                self._changed.wait()
            return None if self._closed else self._pieces.popleft()

    def _read(self, job: _Job, start: int, stop: int) -> None:
        """A piece, by the way that `way` says; what common spans and cached pieces took tells it nothing."""
        if self._way is None or job.span.is_common or self._is_cached(job, start, stop):
            self._fill(job, start, stop, False)
            return
        began, is_direct = time.monotonic(), self._way.is_direct(stop - start)
        if self._fill(job, start, stop, is_direct) == is_direct:
            self._way.tell(is_direct, stop - start, time.monotonic() - began)

    def _fill(self, job: _Job, start: int, stop: int, direct: bool) -> bool:
        """Whether all of it could be read as `direct` says. The last span of a file may end behind the file's end, by
        less than the alignment."""
        file = job.span.extents[0].file
        view = memoryview(job.buffer.bytes_B.numpy())
        wanted = max(extent.stop for extent in job.span.extents) - job.span.start
        while start < min(stop, wanted):
            try:
                count = os.preadv(self._open(file, direct), [view[start:stop]], job.span.start + start)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EFAULT):
                    raise
                direct = False  # a file system without it or of a larger alignment, or memory that no disk can reach
                continue
            if count == 0:
                raise FileChangedError(f"{file} ends at byte {job.span.start + start}: it was cut while being read.")
            start += count
        return direct

    def _is_cached(self, job: _Job, start: int, stop: int) -> bool:
        """Whether the kernel says that half of it or more is."""
        descriptor = self._open(job.span.extents[0].file, False)
        pages = page_cache.cached_pages(descriptor, job.span.start + start, stop - start)
        return pages is not None and 2 * pages * mmap.PAGESIZE >= stop - start

    def _open(self, file: Path, direct: bool) -> int:
        with self._changed:
            if (file, direct) not in self._files:
                self._files[file, direct] = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            return self._files[file, direct]
