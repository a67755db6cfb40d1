"""Prepared weights: a rank's tensors as they lie in its memory after a load, in one file on local disk.

What makes one unusable, or keeps it from being written, costs a start its advantage and never more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.loading.checkpoint_headers import CheckpointError
from engine.loading.prepared import files
from engine.loading.prepared.layout import Layout
from engine.loading.prepared.reading import RefusedError, read
from engine.loading.prepared.writing import write
from engine.loading.progress import PREPARING, LoadProgress
from engine.log import logger


class Preparation(NamedTuple):
    """Where prepared weights are, and how long writing them may take, by its rate so far."""

    directory: str
    most_seconds: float


class PreparedWeights:
    """The file `name` of a preparation's directory, of `tensors` in memory, all on one device.

    make_key: what the file depends on, by name, as JSON values; asked before a load and again before the file is
    written. Raises what that raises."""

    def __init__(
        self,
        preparation: Preparation,
        name: str,
        make_key: Callable[[], dict[str, Any]],
        tensors: dict[str, torch.Tensor],
    ):
        self.path = Path(preparation.directory) / name
        self._most_seconds = preparation.most_seconds
        self._make_key, self._key, self._tensors = make_key, make_key(), tensors
        self.layout = Layout(self._key, tensors)

    def load(self, progress: LoadProgress | None = None) -> bool:
        """Fills the tensors if the file is there, whole, and of this key. Else they hold zeros, and of a file that
        is there the log says why."""
        if not os.path.lexists(self.path):
            return False
        began, device = time.monotonic(), next(iter(self._tensors.values())).device
        try:
            read(self.path, self.layout, device, progress or LoadProgress())
        except (RefusedError, OSError) as error:
            logger.warning("prepared weights: %s is not used: %s; reading the checkpoint instead.", self.path, error)
            for tensor in self._tensors.values():
                tensor.detach().zero_()
            return False
        size, seconds = self.layout.data_bytes / 1e9, time.monotonic() - began
        logger.info("prepared weights: %.2f GB of %s in %.1f s", size, self.path, seconds)
        return True

    def store(self, progress: LoadProgress | None = None) -> bool:
        """Writes the file from the tensors, unless another engine does. Whether it did; else the log says why."""
        if progress is not None:
            progress.enter(PREPARING)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with files.sole_writer(self.path) as is_alone:
                if is_alone:
                    return self._write()
            logger.info("prepared weights: another engine is writing %s", self.path)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "prepared weights: %s was not written (%s); it needs %d bytes, so make room, choose another directory "
                "or leave prepared_weights out; this engine runs without it.",
                self.path,
                error,
                self.layout.num_bytes,
            )
        return False

    def _write(self) -> bool:
        if self._make_key() != self._key:
            logger.warning("prepared weights: the checkpoint changed while it was read; %s not written.", self.path)
            return False
        began = time.monotonic()
        with files.whole_file(self.path) as descriptor:
            write(descriptor, self.layout, self._most_seconds)
        size, seconds = self.layout.num_bytes / 1e9, time.monotonic() - began
        logger.info("prepared weights: %s written, %.2f GB in %.1f s", self.path, size, seconds)
        return True
