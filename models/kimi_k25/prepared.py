"""What a rank's prepared weights depend on beside the checkpoint, and how its file is called."""

from __future__ import annotations

import json
import sys
from typing import Any

from engine.loading.prepared.source import digest, source_key
from engine.loading.prepared.weights import Preparation, PreparedWeights
from engine.loading.weights import Checkpoint
from engine.version import __version__
from models.kimi_k25.model import KimiModel

LAYOUT_VERSION = 1
"""Of where each value lies in the parameters. Raise it with any change there, of the packed tiles as well: files that
were prepared before are then not used."""


def prepared_weights(
    preparation: Preparation, model: KimiModel, checkpoint: Checkpoint, storage: str
) -> PreparedWeights:
    """Of this rank's share. storage: of the checkpoint's experts. Raises CheckpointError."""
    parallel = model.parallel
    name = f"rank-{parallel.rank}-of-{parallel.tp}-ep-{parallel.ep}.prepared"

    def make_key() -> dict[str, Any]:
        return source_key(checkpoint.directory, checkpoint.files) | _share_key(model, storage)

    return PreparedWeights(preparation, name, make_key, dict(model.named_parameters()))


def _share_key(model: KimiModel, storage: str) -> dict[str, Any]:
    parallel = model.parallel
    slots = json.dumps(sorted(model.expert_map.slots.items())) if model.expert_map.slots else None
    return {
        "tp": parallel.tp,
        "ep": parallel.ep,
        "rank": parallel.rank,
        "device": parallel.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "experts": f"{storage} held as {model.expert_storage}",
        "shared expert": "whole" if model.shards_tokens else "sliced",
        "expert map": slots and digest(slots.encode()),
        "model config": digest(repr(model.config).encode()),
        "layout": LAYOUT_VERSION,
        "byte order": sys.byteorder,
        "engine": __version__,
    }
