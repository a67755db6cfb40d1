"""SHA-256 of a checkpoint's files: compared with what its publisher says of them, in the forms that downloads bring.

`SHA256SUMS` as coreutils' sha256sum writes and reads it; else the names of the blobs that a Hugging Face cache links
to; else the notes that `hf download --local-dir` leaves. Knows no tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.config import ConfigError
from engine.json_files import read_text
from engine.loading.progress import SUMS, LoadProgress
from engine.loading.weights import CheckpointError
from engine.log import logger

SUMS_NAME = "SHA256SUMS"
_READ_BYTES = 4 * 2**20
_MOST_READERS = 16
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_SUM = re.compile(r"[0-9a-f]{64}")


def verify(
    directory: Path,
    names: Sequence[str],
    seconds_between_lines: float = 10.0,
    load_progress: LoadProgress | None = None,
) -> None:
    """Reads the files whole, several at once, and compares each with its checksum; progress goes to the log, and to
    load_progress.

    Raises CheckpointError naming the file, ConfigError where nothing says what the sums should be."""
    wanted = expected_sums(directory)
    if not wanted:
        raise ConfigError(
            f"verify_checksums: {directory} has no {SUMS_NAME}, and no checksums of a Hugging Face download; make one "
            f"with `sha256sum *.safetensors > {SUMS_NAME}` where the files are known to be good, or leave it out."
        )
    for name in names:
        if name not in wanted:
            raise CheckpointError(f"{directory / name}: no checksum is known of it; fetch the list of checksums again.")
    sizes = {name: (directory / name).stat().st_size for name in names}
    progress = Progress(sum(sizes.values()), seconds_between_lines, load_progress or LoadProgress())
    for name, found in _sums(directory, sorted(names, key=sizes.get, reverse=True), progress.add):
        if found != wanted[name]:
            raise CheckpointError(
                f"{directory / name}: its SHA-256 is {found}, but should be {wanted[name]}: the file is damaged; fetch "
                "it again."
            )
    logger.info("checksums: all %d files of %s are as published, %s", len(names), directory, progress.words())


def write_sums(directory: Path, names: Sequence[str]) -> None:
    """Writes SHA256SUMS of the files as they are; `sha256sum -c` reads it."""
    found = dict(_sums(directory, names, lambda count: None))
    part = directory / f"{SUMS_NAME}.part"
    part.write_text("".join(f"{found[name]}  {name}\n" for name in sorted(found)))
    os.replace(part, directory / SUMS_NAME)


def expected_sums(directory: Path) -> dict[str, str]:
    """File name -> SHA-256 in lower case; empty where nothing says any. Raises CheckpointError for a list that cannot
    be read."""
    path = directory / SUMS_NAME
    if path.exists():
        return _read_list(path)
    return {file.name: found for file in directory.glob("*.safetensors") if (found := _downloaded(file)) is not None}


def _read_list(path: Path) -> dict[str, str]:
    sums = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{path}: line {number} is not a SHA-256 and a file name; fetch the list again.")
        name = match[2].removeprefix("./")
        if sums.setdefault(name, match[1].lower()) != match[1].lower():
            raise CheckpointError(f"{path}: line {number} gives {name} a second checksum; fetch the list again.")
    return sums


def _downloaded(file: Path) -> str | None:
    """What a Hugging Face download says: large files are named, or tagged, by their SHA-256."""
    if file.is_symlink() and _SUM.fullmatch(blob := Path(os.readlink(file)).name):
        return blob
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    lines = read_text(note).splitlines() if note.is_file() else []
    return lines[1] if len(lines) > 1 and _SUM.fullmatch(lines[1]) else None


def _sums(directory: Path, names: Sequence[str], add: Callable[[int], None]):
    """(name, SHA-256) as they are found, in the order of `names`; what still runs when this ends is given up."""
    stop = threading.Event()
    with ThreadPoolExecutor(min(_MOST_READERS, os.cpu_count() or 1, max(len(names), 1))) as pool:
        try:
            yield from zip(names, pool.map(lambda name: _sum_of(directory / name, add, stop), names), strict=True)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _sum_of(path: Path, add: Callable[[int], None], stop: threading.Event) -> str:
    digest, room = hashlib.sha256(), memoryview(bytearray(_READ_BYTES))
    try:
        with open(path, "rb", buffering=0) as stream:
            while not stop.is_set() and (count := stream.readinto(room)):
                digest.update(room[:count])
                add(count)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); fetch it again.") from error
    return digest.hexdigest()


class Progress:
    """Says now and then in the log how many bytes are done, how fast, and how long it will take."""

    def __init__(self, total: int, seconds_between_lines: float, load_progress: LoadProgress):
        self._total, self._between = total, seconds_between_lines
        self._lock, self._done, self._load_progress = threading.Lock(), 0, load_progress
        load_progress.expect(total, SUMS)
        self._started = self._last = time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._load_progress.add(count)
            now = time.monotonic()
            is_due = now - self._last >= self._between
            if is_due:
                self._last = now
        if is_due:
            left = (now - self._started) * (self._total - self._done) / self._done
            logger.info("checksums: %s of %.1f GB, %.0f s left", self.words(), self._total / 1e9, left)

    def words(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._done / 1e9:.1f} GB at {self._done / 1e9 / seconds:.2f} GB/s"
