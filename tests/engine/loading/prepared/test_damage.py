"""A prepared file that is damaged is refused with its name and the reason, and written anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.loading.prepared import reading
from engine.loading.progress import LoadProgress
from tests.prepared_files import NAME, are_equal, flip, left, prepared, tensors


def cut_short(file: Path) -> str:
    os.truncate(file, file.stat().st_size - 1)
    return "was cut short"


def cut_in_the_header(file: Path) -> str:
    os.truncate(file, 100)
    return "header is damaged"


def too_long(file: Path) -> str:
    with open(file, "ab") as stream:
        stream.write(b"more")
    return "is too long"


def empty(file: Path) -> str:
    os.truncate(file, 0)
    return "no prepared file"


def garbage(file: Path) -> str:
    file.write_bytes(os.urandom(file.stat().st_size))
    return "no prepared file"


def nested(file: Path) -> str:
    file.write_bytes(b"[" * 4096)
    return "header is damaged"


def senseless_key(file: Path) -> str:
    file.write_bytes(b"7\n")
    return "header is damaged"


def flipped_in_the_key(file: Path) -> str:
    flip(file, 3)
    return "prepared for"


def flipped_in_the_table(file: Path) -> str:
    flip(file, file.read_bytes().index(b"torch.float32"))
    return "header is damaged"


def flipped_behind_the_header(file: Path) -> str:
    flip(file, 4000)
    return "header is damaged"


def flipped_in_the_data(file: Path) -> str:
    flip(file, file.stat().st_size - 9000)
    return "are damaged"


def flipped_in_the_sums(file: Path) -> str:
    flip(file, file.stat().st_size - 5)
    return "of one, or their checksum, are damaged"


def zeros_in_the_data(file: Path) -> str:
    """As a file system leaves them that lost a block in a crash."""
    with open(file, "r+b") as stream:
        stream.seek(8192)
        stream.write(bytes(4096))
    return "of wide, or their checksum, are damaged"


def directory(file: Path) -> str:
    file.unlink()
    file.mkdir()
    return "not a regular file"


def pipe(file: Path) -> str:
    file.unlink()
    os.mkfifo(file)
    return "not a regular file"


def loop(file: Path) -> str:
    file.unlink()
    file.symlink_to(file)
    return "symbolic links"


DAMAGES = [
    cut_short, cut_in_the_header, too_long, empty, garbage, nested, senseless_key, flipped_in_the_key,
    flipped_in_the_table, flipped_behind_the_header, flipped_in_the_data, flipped_in_the_sums, zeros_in_the_data,
    directory, pipe, loop,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_written_anew(written, caplog, damage):
    reason = damage(written)
    room = tensors(3)
    found = prepared(written.parent, room)
    assert not found.load() and are_equal(room, tensors(None))
    (record,) = caplog.records
    assert f"{written} is not used" in record.message and reason in record.message
    for name, tensor in tensors().items():
        room[name].copy_(tensor)
    assert found.store() == (damage is not directory)
    assert prepared(written.parent, tensors(None)).load() == (damage is not directory)
    assert left(written.parent) == [NAME]


def test_a_file_that_the_disk_does_not_give_is_refused_and_counts_as_read(written, monkeypatch, caplog):
    def fail(wishes, device):
        yield next(read(wishes, device))
        raise OSError(5, "Input/output error")

    read = reading.tensor_reader.read
    monkeypatch.setattr(reading.tensor_reader, "read", fail)
    room, progress = tensors(3), LoadProgress()
    assert not prepared(written.parent, room).load(progress) and are_equal(room, tensors(None))
    assert "Input/output error" in caplog.text and progress.snapshot().is_complete
