"""Ranks of which some have prepared weights and others not: none waits for what another does not read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from engine.comm.parallel_state import ParallelState
from engine.config import EngineConfig
from engine.loading.shared_reads import Gather
from engine.model_files import ModelFiles
from engine.model_loading import load_share
from models.kimi_k25 import weights
from tests.checkpoints import SMALL, build_checkpoint
from tests.gloo_ranks import on_ranks
from tests.prepared_files import are_equal, left

READY = {"none": (), "one of two": (0,), "both": (0, 1)}
NAMES = [f"rank-{rank}-of-2-ep-2.prepared" for rank in range(2)]


def load(model: str, directory: Path | None, parallel: ParallelState) -> dict[str, torch.Tensor]:
    config = EngineConfig(model, device="cpu", dtype="float32", tp=2, ep=2, prepared_weights=directory)
    return dict(load_share(config, ModelFiles.read(config), parallel).named_parameters())


def _load_each(parallel: ParallelState, model: str, directory: str) -> dict[str, tuple[bool, int]]:
    """With each preparation: whether this rank's parameters are the checkpoint's, and how often it exchanged a piece of
    what it had read."""
    calls: list[torch.Tensor] = []

    def gather(parallel: ParallelState) -> Gather | None:
        def run(piece_B: torch.Tensor) -> torch.Tensor:
            calls.append(piece_B)
            return Gather.over(parallel).run(piece_B)

        return None if parallel.is_share else Gather.over(parallel)._replace(run=run)

    weights.gather_if_faster = gather
    plain, found = load(model, None, replace(parallel, is_share=True)), {}
    for case in READY:
        loaded = load(model, Path(directory, case), parallel)
        found[case] = are_equal(plain, loaded), len(calls)
        calls.clear()
    return found


def test_ranks_read_together_only_where_none_has_its_weights_already(tmp_path):
    model = build_checkpoint(tmp_path / "model", SMALL, shards=3)
    for rank in range(2):
        load(str(model), tmp_path / "made", ParallelState(rank, 2, 2, is_share=True))
    for case, ranks in READY.items():
        (tmp_path / case).mkdir()
        for rank in ranks:
            shutil.copy(tmp_path / "made" / NAMES[rank], tmp_path / case)
    for found in on_ranks(2, tmp_path, _load_each, str(model), str(tmp_path)):
        assert all(is_same for is_same, _ in found.values())
        assert {case: calls > 0 for case, (_, calls) in found.items()} == {case: not READY[case] for case in READY}
    assert all(left(tmp_path / case) == NAMES for case in READY)
