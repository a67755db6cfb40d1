"""Training of a draft: the unrolled graph against inference, vocabulary, loss, files, accept lengths, the whole way."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draft.eagle3.training import export
from draft.eagle3.training.card import draft_card
from draft.eagle3.training.evaluate import accept_lengths, right_guesses, walk
from draft.eagle3.training.incremental import Chain, chain_logits, largest_difference, unrolled_logits
from draft.eagle3.training.model import DraftModel, DraftShape
from draft.eagle3.training.store import FeatureStore, batches_of_rows
from draft.eagle3.training.target import load_target
from draft.eagle3.training.text import Prompts, Text, Writing, write_text
from draft.eagle3.training.train import main
from draft.eagle3.training.trainer import Figures, Settings, Trainer, batch_loss, row_weights
from draft.eagle3.training.vocabulary import choose_tokens, coverage, offsets

VOCAB, WIDTH, STOP = 40, 32, 39
SHAPE = DraftShape(
    VOCAB, WIDTH, draft_vocab_size=24, heads=2, head_width=16, mlp_width=48, feature_layers=(0, 1), max_positions=128
)


class CountingTarget:
    """Writes the token after the last one, and stops at the end of the alphabet. Its states are random functions of the
    token; layer 1's also of the one before."""

    device, dtype = torch.device("cpu"), torch.float32
    vocab_size, width, num_layers, max_positions, eps = VOCAB, WIDTH, 2, 128, 1e-5
    stop_ids, special_ids = [STOP], [38]

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        self.head = torch.randn(VOCAB, WIDTH, generator=generator) * 3 / WIDTH**0.5
        self.final_norm = torch.ones(WIDTH)

    def features(self, ids, layers):
        states = self.embedding[ids]
        before = torch.nn.functional.pad(states, (0, 0, 1, 0))[:, :-1]
        captured = [states, states + 0.5 * before]
        return torch.cat([captured[layer] for layer in layers], -1), 3 * self.head[(ids + 1).clamp_max(STOP)]

    def generate(self, prompts, max_new, temperatures, seed):
        assert len(prompts) == len(temperatures)
        return [np.arange(p[-1] + 1, min(p[-1] + 1 + max_new, STOP + 1), dtype=np.uint16) for p in prompts]


def counting_target(checkpoint, device):
    return CountingTarget()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    target = CountingTarget()
    model = DraftModel(SHAPE, target.embedding)
    counts = np.arange(VOCAB)
    model.initialise(0, offsets(choose_tokens(counts, 24, [STOP, 3])), target.head, target.final_norm)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():  # nothing may hide behind a quiet start
            weight += torch.randn(weight.shape, generator=generator) * 0.2
    return model.eval()


@pytest.fixture
def prompts(tmp_path):
    rng = np.random.default_rng(0)
    ids = [np.arange(first, first + rng.integers(2, 6), dtype=np.uint16) for first in rng.integers(0, 30, 60)]
    starts = np.concatenate(([0], np.cumsum([len(i) for i in ids])))
    source = np.asarray([i % 2 for i in range(60)], np.uint8)
    arrays = {"tokens": np.concatenate(ids), "starts": starts, "source": source, "held_out": np.arange(60) < 12}
    np.savez_compressed(tmp_path / "prompts.npz", **arrays, sources=np.asarray(["letters", "words"]))
    return Prompts.load(tmp_path / "prompts.npz")


def random_sequence(length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 2 * WIDTH, generator=generator), torch.randint(0, VOCAB, (length,), generator=generator)


@pytest.mark.parametrize("position", [0, 1, 5, 12])
def test_unrolled_graph_equals_inference_at_every_step(model, position):
    features, ids = random_sequence(20)
    ours, theirs = (f(model, features, ids, position, 6) for f in (unrolled_logits, chain_logits))
    assert ours.shape == (6, 24) and ours.std() > 0.5
    assert (ours - theirs).abs().max() < 1e-4
    assert largest_difference(model, features, ids, [position], 6) < 1e-4


def test_chain_depends_on_what_it_may_see_alone(model):
    features, ids = random_sequence(20)
    before = unrolled_logits(model, features, ids, 8, 4)
    features[9:] += 1.0
    ids[13:] = 0
    assert torch.equal(unrolled_logits(model, features, ids, 8, 4), before)
    ids[12] = (ids[12] + 1) % VOCAB
    after = unrolled_logits(model, features, ids, 8, 4)
    assert torch.equal(after[:3], before[:3]) and not torch.allclose(after[3], before[3])
    features[0] += 1.0
    assert (unrolled_logits(model, features, ids, 8, 4) - after).abs().amax(1).min() > 1e-3


def test_chain_written_again_from_features_forgets_its_guesses(model):
    """What inference does after a verify: rows of the draft's own states are replaced by those of real features."""
    features, ids = random_sequence(16)
    chain = Chain(model)
    with torch.no_grad():
        chain.extend(features[:6], ids[1:7])
        chain.follow(ids[7]), chain.follow(ids[8])
        del chain.keys[6:], chain.values[6:]
        again = chain.extend(features[6:9], ids[7:10])
        fresh = Chain(model).extend(features[:9], ids[1:10])
    assert torch.allclose(again, fresh, atol=1e-5)


def test_vocabulary_keeps_the_frequent_and_the_forced():
    counts = np.asarray([0, 9, 1, 9, 0, 5, 2, 0])
    chosen = choose_tokens(counts, 4, [7, 0, 7])
    assert chosen.tolist() == [0, 1, 3, 7]
    assert offsets(chosen).tolist() == [0, 0, 1, 4] and offsets(chosen).dtype == torch.int64
    assert coverage(counts, chosen) == 18 / 26
    assert offsets(choose_tokens(counts, 8, [])).tolist() == [0] * 8
    for size, forced in ((1, [1, 2]), (9, [])):
        with pytest.raises(ValueError, match="draft vocabulary"):
            choose_tokens(counts, size, forced)


def test_export_round_trip(model, tmp_path):
    size = export.export(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        *(f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (32, 2 * WIDTH)
    assert size == (tmp_path / "model.safetensors").stat().st_size
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    loaded = export.load(tmp_path, model.embedding)
    assert loaded.shape == SHAPE and torch.equal(loaded.target_ids(), model.target_ids())
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.to(torch.bfloat16).float())
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:5]
    export.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="lm_head"):
        export.load(tmp_path, model.embedding)


def test_text_is_prompts_and_what_the_target_made_of_them(prompts):
    target, chosen = CountingTarget(), np.flatnonzero(~prompts.held_out)
    text = write_text(target, prompts, chosen, Writing(max_new=7, batch=9), seed=0)
    assert len(text) == len(chosen) == 48
    for i in range(len(text)):
        ids = text.tokens[text.starts[i] : text.starts[i + 1]]
        assert (np.diff(ids.astype(int)) == 1).all()
        new = len(ids) - text.prompt_lengths[i]
        assert new == 7 or ids[-1] == STOP
        assert text.written()[text.starts[i] : text.starts[i + 1]].tolist() == [False] * (len(ids) - new) + [True] * new
    assert len(write_text(target, prompts, chosen, Writing(max_new=7, batch=9, seconds=0.0), seed=0)) == 9


def test_store_gives_every_row_its_own_states(prompts):
    target = CountingTarget()
    text = write_text(target, prompts, np.arange(60), Writing(max_new=5, batch=16), seed=0)
    store = FeatureStore(target, text, (1, 0), batch_tokens=100)
    seen = []
    for batch in (store.batch(rows) for rows in batches_of_rows(text.lengths(), np.arange(60), 200)):
        seen += batch.rows.tolist()
        for row, ids, features, valid in zip(batch.rows, batch.ids, batch.features, batch.valid, strict=True):
            own = torch.from_numpy(text.tokens[text.starts[row] : text.starts[row + 1]].astype(np.int64))
            assert torch.equal(ids[valid], own) and not ids[~valid].any()
            assert torch.equal(features[valid], target.features(own[None], (1, 0))[0][0])
        assert batch.ids.numel() <= 200 or len(batch.rows) == 1
    assert sorted(seen) == list(range(60))


def test_loss_counts_rows_whose_token_is_known_and_chains_that_occur():
    text = Text.join([(np.asarray([1, 2, 3], np.uint16), np.asarray([4, 5, 6, 7], np.uint16), 0)])
    batch = FeatureStore(CountingTarget(), text, (0, 1)).batch(np.asarray([0]))
    light, full = 0.25, 1.0
    for step, expected in ((0, [light, light, full, full, full, 0, 0]), (2, [light, light, full, 0, 0, 0, 0])):
        assert row_weights(batch, step, light)[0, :7].tolist() == expected
        assert not row_weights(batch, step, light)[0, 7:].any()


def test_loss_is_the_soft_cross_entropy_of_the_token_after_next(model):
    target = CountingTarget()
    text = Text.join([(np.asarray([5, 6], np.uint16), np.asarray([7, 8, 9], np.uint16), 0)])
    batch = FeatureStore(target, text, (0, 1)).batch(np.asarray([0]))
    settings, figures = Settings(1.0, steps=2, prompt_weight=0.0), Figures.zeros(2, target.device)
    with torch.no_grad():
        loss = batch_loss(model, target.head, batch, settings, figures)
        expected = 0.0
        for step, rows in ((0, (1, 2)), (1, (1,))):
            losses = []
            for t in rows:
                wanted = (batch.hidden[0, t + 1 + step] @ target.head[model.target_ids()].t()).softmax(-1)
                logits = chain_logits(model, batch.features[0, :5], batch.ids[0, :6], t, step + 1)[-1]
                losses.append(-(wanted * logits.log_softmax(-1)).sum())
            expected += 0.8**step * sum(losses) / len(losses)
    assert torch.allclose(loss, torch.as_tensor(expected), atol=1e-4)
    assert figures.rows.tolist() == [2, 1]


def test_walk_commits_what_is_right_and_one_more():
    right = np.zeros((12, 3), bool)
    right[2] = [True, True, False]
    right[5] = True
    assert walk(right, 3, 3) == [3, 4, 1]
    assert walk(right, 3, 1) == [2, 1, 2, 1, 1, 1]
    assert walk(right, 11, 3) == [] and walk(np.ones((12, 3), bool), 3, 3) == [4, 4]
    assert walk(np.ones((11, 3), bool), 3, 3) == [4, 3]


def test_training_learns_to_count_and_the_chain_guesses_as_measured(prompts):
    target = CountingTarget()
    text = write_text(target, prompts, np.flatnonzero(~prompts.held_out), Writing(max_new=20), seed=0)
    kept = write_text(target, prompts, np.flatnonzero(prompts.held_out), Writing(max_new=20, greedy_share=1.0), seed=1)
    model = DraftModel(SHAPE, target.embedding)
    counts = np.bincount(text.tokens, minlength=VOCAB)
    model.initialise(0, offsets(choose_tokens(counts, 24, [])), target.head, target.final_norm)
    store, held_out = FeatureStore(target, text, (0, 1)), FeatureStore(target, kept, (0, 1))
    settings = Settings(1e9, batch_tokens=400, steps=3, learning_rate=1e-2, max_updates=40)
    trainer = Trainer(model, target.head, store, settings, log=lambda line: None)
    before = accept_lengths(model, held_out, prompts.sources, (3,))
    trainer.run()
    after = accept_lengths(model, held_out, prompts.sources, (1, 3))
    assert trainer.updates == 40
    assert after["all"]["accept_length"]["3"] > max(2.0, before["all"]["accept_length"]["3"])
    assert set(after) == {"letters", "words", "all"}
    _assert_measured_as_drafted(model, held_out)


def _assert_measured_as_drafted(model: DraftModel, held_out: FeatureStore) -> None:
    """Chains fed with their own guesses, one at a time."""
    right = right_guesses(model, held_out, 3)
    for row in range(4):
        batch = held_out.batch(np.asarray([row]))
        length = int(held_out.text.lengths()[row])
        for t in range(length - 4):
            chain, matched = Chain(model), 0
            with torch.no_grad():
                logits = chain.extend(batch.features[0, : t + 1], batch.ids[0, 1 : t + 2])
                while matched < 3:
                    guess = model.target_ids()[logits.argmax()]
                    if guess != batch.ids[0, t + 2 + matched]:
                        break
                    matched += 1
                    logits = chain.follow(guess)
            assert matched == int(np.argmin(np.append(right[row][t], False)))


def test_the_whole_way_from_prompts_to_a_draft_directory(prompts, tmp_path):
    words = f"--target {__name__}:counting_target --checkpoint none --out {tmp_path / 'out'} --data {tmp_path}"
    words += " --device cpu --minutes 10 --max-updates 5 --max-new 12 --layers 0 1 --draft-vocab 24 --steps 3"
    main(words.split())
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["largest_logit_difference"] < 1e-3 and report["training"]["updates"] == 5
    assert report["accept"]["all"]["sequences"] == 12
    card = (tmp_path / "out" / "draft" / "README.md").read_text()
    assert card == draft_card(report) and "| letters | 6 |" in card
    assert export.load(tmp_path / "out" / "draft", CountingTarget().embedding).shape.draft_vocab_size == 24


def test_a_target_is_named_by_module_and_function(tmp_path):
    with pytest.raises(ValueError, match="module:function"):
        load_target("models.some_target", tmp_path, torch.device("cpu"))
