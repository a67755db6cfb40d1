"""The incremental path against the formulas of one whole sequence, in float32, for every variant of a draft."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draft.base import DraftRows
from tests.drafts import write_draft
from tests.eagle3_oracle import Oracle
from tests.eagle3_runs import HIDDEN, LENGTHS, LLAMA, MLA, VOCABULARY, Run, load, target_weights, texts

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
DEEPSEEK_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
VARIANTS = {
    "mla": (MLA, {}),
    "mla, target's embedding and head": (replace(MLA, has_embedding=False, has_head=False), {}),
    "mla, full rank queries": (replace(MLA, q_lora_rank=None), {}),
    "mla, yarn": (MLA, {"rope_scaling": DEEPSEEK_YARN, "rope_theta": 100.0}),
    "mla, norm before residual": (MLA, {"norm_before_residual": True}),
    "mla, 3.1": (replace(MLA, fc_norm=True), {"norm_output": True}),
    "mla, legacy norms": (replace(MLA, fc_norm=True, legacy_norm_names=True), {}),
    "mla, norm before fc": (replace(MLA, norm_before_fc=True), {}),
    "mla, reduced vocabulary": (replace(MLA, draft_vocab_size=40, has_t2d=True), {}),
    "mla, tied": (replace(MLA, has_head=False), {"tie_word_embeddings": True}),
    "llama": (LLAMA, {}),
    "llama, one head each": (replace(LLAMA, num_kv_heads=4), {}),
    "llama, yarn": (LLAMA, {"rope_scaling": YARN, "rope_theta": 100.0}),
    "llama, yarn with both mscales": (LLAMA, {"rope_scaling": DEEPSEEK_YARN | {"mscale": 0.7}, "rope_theta": 100.0}),
    "llama, norm before residual": (LLAMA, {"norm_before_residual": True, "norm_output": True}),
    "llama, reduced vocabulary, tied to nothing": (replace(LLAMA, draft_vocab_size=33), {}),
    "llama, tied to the target's": (replace(LLAMA, has_head=False), {"tie_word_embeddings": True}),
}


def expected(directory, data, lengths, count):
    oracle = Oracle(directory, *target_weights())
    return [
        oracle.guesses(data.features[n][:length], data.next_ids[n][:length].tolist(), count)
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_chunks_and_chains_equal_the_whole_sequence(tmp_path, variant):
    shape, changes = VARIANTS[variant]
    directory = write_draft(tmp_path, shape, layer_ids=(2, 4, 5), seed=len(variant), **changes)
    data, caches = texts(), []
    oracle = expected(directory, data, LENGTHS, 3)
    for size in (1, 7, max(LENGTHS)):
        run = Run(load(directory))
        rows = run.prefill(data, size)
        written = run.cache.clone()
        first, hidden = run.drafter.predict(rows, run.last_rows(LENGTHS), run.cache)
        assert first.dtype == torch.int64
        for n in range(len(LENGTHS)):
            assert torch.allclose(hidden[n], oracle[n][1][0], rtol=1e-4, atol=1e-4)
        assert run.propose(rows, LENGTHS, 3).tolist() == [tokens for tokens, _ in oracle]
        caches.append(written)
    for other in caches[1:]:
        assert torch.allclose(caches[0], other, atol=1e-5, equal_nan=True), "chunk borders leave no trace"


@pytest.mark.parametrize("shape", [MLA, LLAMA], ids=["mla", "llama"])
@torch.inference_mode()
def test_real_features_take_the_place_of_guesses(tmp_path, shape):
    """A verify step's rows overwrite what the draft wrote while it guessed: then all is as after a fresh prefill."""
    directory = write_draft(tmp_path, shape, layer_ids=(2, 4, 5))
    data, run = texts(), Run(load(directory))
    run.propose(run.prefill(data, 20), LENGTHS, 4)
    chunks = [(n, length, length + 4) for n, length in enumerate(LENGTHS)]
    rows = run.extend(data, chunks)
    accepted = (3, 1)
    picked = rows.select(torch.tensor([accepted[0] - 1, 4 + accepted[1] - 1]))
    lengths = tuple(length + m for length, m in zip(LENGTHS, accepted, strict=True))
    assert run.propose(picked, lengths, 2).tolist() == [t for t, _ in expected(directory, data, lengths, 2)]


@torch.inference_mode()
def test_each_flag_changes_the_states(tmp_path):
    """A flag that is read and not used would pass for one that is honoured."""
    data, states = texts(), {}
    for name, shape, changes in (
        ("plain", MLA, {}),
        ("norm_before_residual", MLA, {"norm_before_residual": True}),
        ("norm_output", MLA, {"norm_output": True}),
        ("fc_norm", replace(MLA, fc_norm=True), {}),
        ("norm_before_fc", replace(MLA, norm_before_fc=True), {}),
    ):
        run = Run(load(write_draft(tmp_path / name, shape, layer_ids=(2, 4, 5), **changes)))
        rows = run.prefill(data, 20)
        states[name] = run.drafter.predict(rows, run.last_rows(LENGTHS), run.cache)[1]
    for name, state in states.items():
        assert name == "plain" or (state - states["plain"]).abs().max() > 0.1, name


@torch.inference_mode()
def test_only_the_features_of_all_layers_will_do(tmp_path):
    """A state of the draft's own width must not pass for features: `fc` is never left out."""
    run, data = Run(load(write_draft(tmp_path, MLA, layer_ids=(2, 4, 5)))), texts()
    data.features = [f[:, :HIDDEN] for f in data.features]
    with pytest.raises(ValueError, match=f"3 states of {HIDDEN} numbers a row, not {HIDDEN} numbers"):
        run.extend(data, [(0, 0, 3)])


@torch.inference_mode()
def test_padding_rows_change_nothing(tmp_path):
    """Requests of length 0 in a padded step: finite, and the others' guesses as without them."""
    for name, shape in (("mla", MLA), ("llama", LLAMA)):
        run, data = Run(load(write_draft(tmp_path / name, shape, layer_ids=(2, 4, 5)))), texts()
        rows = run.prefill(data, 20)
        alone = run.propose(rows, LENGTHS, 1)
        batch = run.batch([(n, s - 1, s) for n, s in enumerate(LENGTHS)] + [(0, 0, 1)])
        batch.seq_lens[2], batch.seq_lens_N[2], batch.slots_T[2] = 0, 0, 0
        padded = DraftRows(*(torch.cat((t, torch.zeros_like(t[:1]))) for t in (rows.x, rows.residual_TD)))
        ids, hidden = run.drafter.predict(padded, batch, run.cache)
        assert ids[:2].tolist() == alone[:, 0].tolist() and hidden.isfinite().all() and 0 <= ids[2] < VOCABULARY
        run.drafter.follow(hidden, ids, batch, run.cache)
        assert run.cache[0, 0].isfinite().all()
