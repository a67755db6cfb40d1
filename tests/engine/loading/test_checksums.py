"""Checksums of weight files: every form in which a download brings them, and damage that no header shows."""

from __future__ import annotations

import logging
import shutil
import subprocess

import pytest

from engine.config import ConfigError, EngineConfig
from engine.launch import start_engine
from engine.loading import checksums
from engine.loading.checksums import SUMS_NAME, expected_sums, verify, write_sums
from engine.loading.progress import SUMS, LoadProgress
from engine.loading.weights import CheckpointError, weight_files
from engine.model_files import ModelFiles
from engine.model_loading import verify_checksums
from tests.checkpoints import SMALL, build_checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    directory = build_checkpoint(tmp_path_factory.mktemp("sums"), SMALL, shards=3)
    write_sums(directory, names_of(directory))
    return directory


def names_of(directory) -> list[str]:
    return [file.name for file in weight_files(directory)]


def copied(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def flip_a_bit(path) -> None:
    """Of a weight, so that every header is as before."""
    with open(path, "r+b") as stream:
        stream.seek(-40, 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 1]))


def start(directory, **settings):
    settings = {"verify_checksums": True, "self_test": False} | settings
    return start_engine(EngineConfig(str(directory), device="cpu", dtype="float32", num_threads=1, **settings))


def test_coreutils_agrees(sound):
    done = subprocess.run(["sha256sum", "-c", SUMS_NAME], cwd=sound, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(": OK") == 3


def test_a_flipped_bit_that_no_header_shows_stops_the_start(sound, tmp_path, caplog):
    directory = copied(sound, tmp_path)
    with caplog.at_level(logging.INFO):
        start(directory)[1].close()
    assert f"checksums: all 3 files of {directory} are as published" in caplog.text
    damaged = directory / names_of(directory)[1]
    flip_a_bit(damaged)
    start(directory, verify_checksums=False)[1].close()
    with pytest.raises(CheckpointError, match=rf"{damaged}: its SHA-256 is .* the file is damaged; fetch it again\.$"):
        start(directory)


def test_the_forms_of_a_download(sound, tmp_path):
    """A cache links to blobs named by their sum, --local-dir leaves notes; neither is asked where a list is."""
    sums = expected_sums(sound)
    blobs, snapshot, local = tmp_path / "blobs", tmp_path / "snapshots" / "1", tmp_path / "local"
    for directory in (blobs, snapshot, local / ".cache" / "huggingface" / "download"):
        directory.mkdir(parents=True)
    for name, found in sums.items():
        shutil.copy(sound / name, blobs / found)
        (snapshot / name).symlink_to(f"../../blobs/{found}")
        shutil.copy(sound / name, local / name)
        (local / ".cache" / "huggingface" / "download" / f"{name}.metadata").write_text(f"0123abc\n{found}\n17.0\n")
    for directory in (snapshot, local):
        assert expected_sums(directory) == sums
        verify(directory, list(sums))
        flip_a_bit(directory / min(sums))
        with pytest.raises(CheckpointError, match=min(sums)):
            verify(directory, list(sums))
    (local / SUMS_NAME).write_text("".join(f"{'0' * 64} *./{name}\n" for name in sums))
    assert set(expected_sums(local).values()) == {"0" * 64}


def test_without_any_checksum_the_way_to_make_them_is_said(tmp_path):
    directory = build_checkpoint(tmp_path, SMALL)
    with pytest.raises(ConfigError, match=r"no SHA256SUMS.*sha256sum \*\.safetensors > SHA256SUMS"):
        start(directory)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense\n", "line 1 is not a SHA-256"),
        (f"{'a' * 64}  other.safetensors\n", "no checksum is known of it"),
        (f"{'a' * 64}  x\n\n{'b' * 64}  x\n", "line 3 gives x a second checksum"),
        ("\0" * 70, "line 1"),
    ],
)
def test_a_list_that_makes_no_sense(sound, tmp_path, text, words):
    directory = copied(sound, tmp_path)
    (directory / SUMS_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        verify(directory, names_of(directory))


def test_progress_is_told_while_files_are_read(sound, monkeypatch, caplog):
    monkeypatch.setattr(checksums, "_READ_BYTES", 1 << 14)
    with caplog.at_level(logging.INFO):
        verify(sound, names_of(sound), seconds_between_lines=0.0)
    lines = [record.getMessage() for record in caplog.records]
    size = sum((sound / name).stat().st_size for name in names_of(sound))
    assert len(lines) - 1 == sum(-(-(sound / name).stat().st_size // (1 << 14)) for name in names_of(sound))
    assert all("GB/s of" in line and "s left" in line for line in lines[:-1]) and size > 3 << 14


def test_the_bytes_of_a_comparison_are_counted_for_health(sound):
    progress, names = LoadProgress(), names_of(sound)
    verify(sound, names, load_progress=progress)
    size = sum((sound / name).stat().st_size for name in names)
    assert progress.snapshot().shares == ((size, size),) and progress.phase == SUMS
    progress.join(0, 1, None)
    assert progress.snapshot().shares == ((0, 0),), "weights are counted anew"


def test_processes_share_the_files(sound, monkeypatch):
    read = []
    monkeypatch.setattr(checksums, "verify", lambda directory, names, load_progress: read.append(names))
    config = EngineConfig(str(sound), device="cpu", dtype="float32")
    files = ModelFiles.read(config)
    for place in range(2):
        verify_checksums(files, place, 2)
    assert sorted(read[0] + read[1]) == names_of(sound)


def test_made_up_weights_have_no_files_to_verify():
    with pytest.raises(ConfigError, match="verify_checksums"):
        EngineConfig(verify_checksums=True, load_format="dummy")
