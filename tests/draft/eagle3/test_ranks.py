"""A draft split over ranks guesses what one rank guesses, with the collectives it should take and no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.comm import meter
from engine.comm.parallel_state import ParallelState
from tests.dispatch_world import PartsKernels
from tests.drafts import write_draft
from tests.eagle3_runs import LENGTHS, LLAMA, MLA, VOCABULARY, Run, load, texts
from tests.gloo_ranks import on_ranks

VARIANTS = {
    "mla": (MLA, {}, "reference"),
    "target's": (replace(MLA, has_embedding=False, has_head=False), {}, "symm_replicated"),
    "3.1": (replace(MLA, fc_norm=True), {"norm_output": True}, "allreduce"),
    "llama": (replace(LLAMA, draft_vocab_size=33), {}, "reference"),
    "llama, norms": (replace(LLAMA, norm_before_fc=True), {"norm_before_residual": True}, "reference"),
    "tied": (replace(MLA, has_head=False), {"tie_word_embeddings": True}, "reference"),
}
COUNT = 4


@torch.inference_mode()
def guesses(parallel: ParallelState, directory: str) -> dict:
    """What a rank guesses in each variant, its states, and the rounds of `COUNT` guesses and of an extension alone."""
    out, data = {}, texts()
    for name, (_, _, dispatcher) in VARIANTS.items():
        drafter = load(Path(directory) / name, parallel, kernels=PartsKernels() if "llama" in name else None)
        run = Run(drafter, parallel, dispatcher)
        parallel.meter.clear()
        rows = run.prefill(data, 20)
        extend = dict(parallel.meter.rounds)
        batch = run.last_rows(LENGTHS)
        hidden = drafter.predict(rows, batch, run.cache)[1].clone()
        parallel.meter.clear()
        tokens = run.propose(rows, LENGTHS, COUNT)
        out[name] = {"tokens": tokens, "hidden": hidden, "extend": extend, "propose": dict(parallel.meter.rounds)}
    return out


@pytest.mark.parametrize("tp", [2, 4])
def test_any_number_of_ranks_guesses_alike(tmp_path, tp):
    for name, (shape, changes, _) in VARIANTS.items():
        write_draft(tmp_path / name, shape, layer_ids=(2, 4, 5), **changes)
    alone = guesses(ParallelState(), str(tmp_path))
    for rank in on_ranks(tp, tmp_path, guesses, str(tmp_path)):
        for name, seen in rank.items():
            assert torch.equal(seen["tokens"], alone[name]["tokens"]), name
            assert torch.allclose(seen["hidden"], alone[name]["hidden"], rtol=1e-4, atol=1e-4), name
            nothing = dict.fromkeys(meter.KINDS, 0)
            assert seen["extend"] == nothing | {meter.ATTENTION_REDUCE: 2}, "features, embeddings"
            reduces = 2 * COUNT + (COUNT - 1)
            assert seen["propose"] == nothing | {meter.ATTENTION_REDUCE: reduces, meter.OTHER: COUNT}, name


@pytest.mark.parametrize("shape", [MLA, LLAMA], ids=["mla", "llama"])
@torch.inference_mode()
def test_a_share_of_a_world_runs_by_itself(tmp_path, shape):
    """Its guesses are among its own rows of the vocabulary."""
    parallel = ParallelState(tp=4, is_share=True)
    directory = write_draft(tmp_path, shape, layer_ids=(2, 4, 5))
    for seed in (None, 3):
        run = Run(load(directory, parallel, dummy_seed=seed), parallel)
        tokens = run.propose(run.prefill(texts(), 20), LENGTHS, 3)
        assert tokens.shape == (2, 3) and int(tokens.min()) >= 0 and int(tokens.max()) < VOCABULARY // 4


@pytest.mark.parametrize(
    ("shape", "tp", "message"),
    [
        (MLA, 8, "attention heads of the draft"),
        (replace(MLA, intermediate_size=50, num_heads=4), 4, "feed-forward columns of the draft"),
        (replace(LLAMA, num_heads=12, num_kv_heads=6), 4, "6 key heads of the draft"),
        (replace(MLA, num_heads=5), 5, "feature columns of the draft"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_sum(tmp_path, shape, tp, message):
    directory = write_draft(tmp_path, shape, layer_ids=(2, 4, 5))
    with pytest.raises(ValueError, match=message):
        load(directory, ParallelState(tp=tp, device=torch.device("meta")))
