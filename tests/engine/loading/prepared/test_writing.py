"""Writing a prepared file: full and slow disks, several engines at once, engines that die. Nothing is lost, or looks
whole and is not."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from engine.loading.checkpoint_headers import CheckpointError
from engine.loading.prepared import files, writing
from engine.loading.prepared.weights import Preparation, PreparedWeights
from tests.prepared_files import KEY, NAME, are_equal, left, prepared, tensors
from tests.processes import until


@pytest.mark.parametrize("call", ["open", "posix_fallocate", "pwrite", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_leaves_the_old_file_and_no_other(written, monkeypatch, caplog, call, code):
    before = written.read_bytes()

    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        other = prepared(written.parent, tensors(5), source="another")
        patched.setattr(files.os, call, fail)
        assert not other.store()
    assert left(written.parent) == [NAME] and written.read_bytes() == before
    (record,) = caplog.records
    assert os.strerror(code) in record.message and f"needs {other.layout.num_bytes} bytes" in record.message
    assert other.store() and left(written.parent) == [NAME] and written.read_bytes() != before


@pytest.fixture
def limit():
    """The system writes no file further than to byte 20,000."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("is_foreseen", [True, False], ids=["before writing", "in the middle"])
def test_a_system_that_gives_no_room_ends_writing(limit, tmp_path, monkeypatch, caplog, is_foreseen):
    if is_foreseen:
        monkeypatch.setattr(writing, "_write_at", None)
    else:
        monkeypatch.setattr(writing.os, "posix_fallocate", lambda *arguments: None)
    assert not prepared(tmp_path, tensors()).store() and left(tmp_path) == []
    assert len(caplog.records) == 1 and os.strerror(errno.EFBIG) in caplog.text


def test_a_slow_disk_ends_writing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writing, "_UNJUDGED_SECONDS", 0.0)
    assert not prepared(tmp_path, tensors(), most_seconds=0.0).store() and left(tmp_path) == []
    assert len(caplog.records) == 1 and "the disk is slow" in caplog.text


def test_a_rate_is_judged_by_what_is_left():
    writing._check_rate(5.0, 0.001, 60.0)
    writing._check_rate(29.0, 0.5, 60.0)
    with pytest.raises(OSError, match="would take 62 s, allowed are 60"):
        writing._check_rate(31.0, 0.5, 60.0)


def test_writing_takes_no_memory_of_the_size_of_the_weights(tmp_path):
    values = {"large": torch.ones(32 * 2**20)}
    found = prepared(tmp_path, values)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    assert found.store() and values["large"].nbytes == 128 * 2**20
    assert _status("VmHWM") - before < 40 * 2**20


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@pytest.mark.parametrize("place", ["a file", "in a file"])
def test_a_directory_that_is_none_is_a_warning(tmp_path, caplog, place):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" if place == "a file" else tmp_path / "file" / "below"
    assert not prepared(where, tensors()).load()
    assert not prepared(where, tensors()).store() and "was not written" in caplog.text


@pytest.mark.parametrize("end", ["changed", "gone"])
def test_a_source_that_changes_while_it_is_read_is_not_prepared(tmp_path, caplog, end):
    asked = []

    def make_key() -> dict:
        asked.append(end)
        if len(asked) == 2 and end == "gone":
            raise CheckpointError("the file is gone.")
        return KEY | {"source": len(asked)}

    assert not PreparedWeights(Preparation(str(tmp_path), 60.0), NAME, make_key, tensors()).store()
    assert end in caplog.text and len(caplog.records) == 1 and left(tmp_path) == []


def test_of_two_writers_the_second_leaves_it_to_the_first(tmp_path, caplog):
    caplog.set_level("INFO")
    found = prepared(tmp_path, tensors())
    with files.sole_writer(found.path) as is_alone:
        assert is_alone and not found.store() and left(tmp_path) == []
    assert "another engine is writing" in caplog.text
    assert found.store() and left(tmp_path) == [NAME]


def _context() -> multiprocessing.context.BaseContext:
    """Processes that have none of this one's threads, whose locks a fork would copy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    return context


def _store_when_told(directory: Path, seed: int, barrier, answer) -> None:
    found = prepared(directory, tensors(seed), source=str(seed))
    barrier.wait(60)
    answer.put(found.store())


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path):
    context = _context()
    barrier, answer = context.Barrier(3), context.SimpleQueue()
    processes = [context.Process(target=_store_when_told, args=(tmp_path, seed, barrier, answer)) for seed in range(3)]
    for process in processes:
        process.start()
    stored = [answer.get() for _ in processes]
    for process in processes:
        process.join(60)
    assert any(stored) and left(tmp_path) == [NAME]
    rooms = {seed: tensors(None) for seed in range(3)}
    loaded = [seed for seed, room in rooms.items() if prepared(tmp_path, room, source=str(seed)).load()]
    assert len(loaded) == 1 and are_equal(rooms[loaded[0]], tensors(loaded[0]))


def _stop_in_the_middle(directory: Path, begun) -> None:
    write = files.os.pwrite

    def write_and_stop(*arguments):
        if arguments[-1] > 0:
            begun.set()
            signal.pause()
        return write(*arguments)

    files.os.pwrite = write_and_stop
    prepared(directory, tensors()).store()


def test_a_writer_killed_in_the_middle_leaves_nothing_that_looks_whole(tmp_path):
    context = _context()
    begun = context.Event()
    process = context.Process(target=_stop_in_the_middle, args=(tmp_path, begun))
    process.start()
    assert begun.wait(60)
    assert not prepared(tmp_path, tensors()).store()  # it is being written
    process.kill()
    process.join(60)
    assert left(tmp_path) == [f".{NAME}.part"]
    again = prepared(tmp_path, tensors())
    assert not again.load()
    until(again.store, 60, "the dead writer's lock is free")
    assert left(tmp_path) == [NAME]
    room = tensors(None)
    assert prepared(tmp_path, room).load() and are_equal(room, tensors())


def test_an_interrupt_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "pwrite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, tensors()).store()
    assert left(tmp_path) == []
