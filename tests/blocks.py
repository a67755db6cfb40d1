"""Small KV blocks, so that short requests cross many."""

from __future__ import annotations

import pytest

import engine.cache_plan
import engine.model_runner
import engine.rehearsal
import engine.replica


def set_block_size(patch: pytest.MonkeyPatch, size: int) -> None:
    for module in (engine.cache_plan, engine.model_runner, engine.rehearsal, engine.replica):
        patch.setattr(module, "BLOCK_SIZE", size)
