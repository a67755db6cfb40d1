"""Directories that hold a configuration alone, for engines with made-up weights."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoints import SMALL, Shape, model_config


def config_directory(directory: Path, shape: Shape = SMALL, quant: str = "int4") -> Path:
    """`directory` with the config.json of `shape` and nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model_config(shape, quant, "kimi_k25", "rope_scaling", "dtype")
    (directory / "config.json").write_text(json.dumps(config))
    return directory
