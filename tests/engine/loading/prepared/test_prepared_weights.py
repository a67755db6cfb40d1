"""A prepared file gives back every byte to the start that it was prepared for, and to no other."""

from __future__ import annotations

import pytest
import torch

from engine.loading.prepared import layout
from engine.loading.prepared.layout import BLOCK_BYTES, Layout, checksum
from engine.loading.progress import PREPARING, LoadProgress
from tests.prepared_files import KEY, NAME, are_equal, left, prepared, tensors


@pytest.mark.parametrize("chunk_bytes", [layout.CHUNK_BYTES, 2 * BLOCK_BYTES])
def test_every_byte_comes_back(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(layout, "CHUNK_BYTES", chunk_bytes)
    assert prepared(tmp_path, tensors()).store()
    room, progress = tensors(None), LoadProgress()
    assert prepared(tmp_path, room).load(progress) and are_equal(room, tensors())
    shot = progress.snapshot()
    assert shot.is_complete and shot.done == sum(tensor.nbytes for tensor in room.values())
    assert left(tmp_path) == [NAME]


def test_nothing_is_said_of_a_file_that_is_not_there(tmp_path, caplog):
    assert not prepared(tmp_path, tensors()).load() and not prepared(tmp_path / "no" / "such", tensors()).load()
    assert caplog.text == ""


def test_writing_has_a_phase(tmp_path):
    progress = LoadProgress()
    assert prepared(tmp_path / "made" / "anew", tensors()).store(progress) and progress.phase == PREPARING


@pytest.mark.parametrize("changes", [{"tp": 4}, {"rank": 0}, {"source": "abd"}, {"new": 1}])
def test_another_key_is_refused_and_named(written, caplog, changes):
    assert not prepared(written.parent, tensors(), **changes).load()
    assert f"{written} is not used: it was prepared for {next(iter(changes))} " in caplog.text


@pytest.mark.parametrize("change", [lambda t: t.reshape(257, 33), lambda t: t.double(), lambda t: t[:5].clone()])
def test_other_tensors_are_refused(written, caplog, change):
    others = tensors() | {"wide": change(tensors()["wide"])}
    assert not prepared(written.parent, others).load() and "other tensors" in caplog.text


def test_another_format_is_refused(written, caplog, monkeypatch):
    monkeypatch.setattr(layout, "FORMAT_VERSION", 3)
    assert not prepared(written.parent, tensors()).load() and "prepared for format 2, wanted is 3" in caplog.text


def test_bytes_apart_from_each_other_are_no_tensor_to_prepare():
    with pytest.raises(ValueError, match="cut do not lie together"):
        Layout(KEY, {"cut": torch.zeros(4, 4)[:, :2]})


def test_the_checksum_finds_every_flipped_bit_and_blocks_that_changed_places():
    bytes_B = torch.randint(0, 256, (3 * BLOCK_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sound, sums = checksum(bytes_B), []
    for place in range(0, len(bytes_B), 61):
        for bit in range(8):
            bytes_B[place] ^= 1 << bit
            sums.append(checksum(bytes_B))
            bytes_B[place] ^= 1 << bit
    assert sound not in torch.stack(sums) and sound == checksum(bytes_B)
    assert checksum(bytes_B.view(3, -1).flip(0).flatten()) != sound


def test_the_checksum_finds_a_hole_stuck_bits_and_words_that_changed_places():
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(-(2**63), 2**63 - 1, (4 * BLOCK_BYTES // 8,), generator=generator)
    sound = checksum(words.view(torch.uint8))
    assert checksum(torch.zeros(BLOCK_BYTES, dtype=torch.uint8)) != 0, "a hole where data and checksum were"
    for bit in range(64):
        flipped = words.clone()
        flipped[[3, 700]] ^= torch.tensor(1 << bit if bit < 63 else -(2**63))
        stuck = words | (1 << bit if bit < 63 else -(2**63))
        assert checksum(flipped.view(torch.uint8)) != sound and checksum(stuck.view(torch.uint8)) != sound, bit
    halves = torch.cat((words[256:512], words[:256], words[512:]))
    assert checksum(halves.view(torch.uint8)) != sound
