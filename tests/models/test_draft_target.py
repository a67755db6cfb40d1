"""The target of draft training: its stored weights, its cached writing and its features against the training model."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from draft.eagle3.training.text import Prompts
from models.kimi_k25.training.architecture import Architecture
from models.kimi_k25.training.attention import MaskBuilder, attention_function
from models.kimi_k25.training.documents import Document, assistant, user
from models.kimi_k25.training.draft_prompts import cut, prompt_of, write
from models.kimi_k25.training.draft_target import DraftTarget, causal_attention
from models.kimi_k25.training.export import export
from models.kimi_k25.training.generation import greedy
from models.kimi_k25.training.model import TinyKimi
from models.kimi_k25.training.prepare import load_renderer
from models.kimi_k25.training.quantization import fake_quantize
from models.kimi_k25.training.stored import load_stored, read_architecture
from models.kimi_k25.training.train import TINY
from tests.small_target import SMALL


@pytest.fixture(scope="module")
def trained():
    model = TinyKimi(SMALL, attention_function("sdpa"))
    model.initialise(3)
    generator = torch.Generator().manual_seed(8)
    for moe in model.moe_layers():
        moe.correction_bias += torch.randn(SMALL.n_routed_experts, generator=generator) * 0.1
    return model


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    SMALL.write(folder)
    export(trained, folder)
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return DraftTarget(folder, torch.device("cpu"))


def test_the_tiny_checkpoint_has_the_sizes_of_the_code():
    assert read_architecture(TINY) == Architecture()


def test_stored_weights_are_those_that_training_simulated(trained, folder):
    stored = load_stored(folder, causal_attention)
    assert stored.a == SMALL
    for name, weight in trained.state_dict().items():
        expected = weight if "bias" in name else weight.to(torch.bfloat16).float()
        if "experts_" in name:
            expected = fake_quantize(weight, torch.tensor(1.0)).to(torch.bfloat16).float()
        assert torch.equal(stored.state_dict()[name], expected), name


def test_cached_writing_equals_whole_sequences(folder, target, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, n).astype(np.uint16) for n in (3, 17, 9, 30, 1, 5)]
    plain = load_stored(folder, attention_function("sdpa"))
    alone = greedy(plain, [p.tolist() for p in prompts], set(), 20, torch.device("cpu"))
    monkeypatch.setattr("models.kimi_k25.training.draft_target.PREFILL_SCORES", 4000)
    monkeypatch.setattr(target, "stop_ids", [])
    assert [w.tolist() for w in target.generate(prompts, 20, [0.0] * 6, 0)] == alone
    # Rows that end early leave the batch, the others go on unchanged.
    monkeypatch.setattr("models.kimi_k25.training.draft_target.COMPACT_EVERY", 2)
    stop = alone[1][4]
    monkeypatch.setattr(target, "stop_ids", [stop])
    ended = [w[: w.index(stop) + 1] if stop in w else w for w in alone]
    assert [w.tolist() for w in target.generate(prompts, 20, [0.0] * 6, 0)] == ended
    assert any(len(w) < 20 for w in ended)


def test_temperature_draws_from_the_distribution(target):
    prompt = np.asarray([5, 6, 7], np.uint16)
    drawn = [int(w[0]) for w in target.generate([prompt] * 2000, 1, [1.0] * 1999 + [0.0], 1)]
    _, hidden = target.features(torch.tensor([[5, 6, 7]]), (0,))
    probabilities = (hidden[0, -1] @ target.head.t()).softmax(-1)
    assert drawn[-1] == int(probabilities.argmax())
    top = probabilities.topk(5).indices.tolist()
    share = sum(token in top for token in drawn[:-1]) / 1999
    assert abs(share - float(probabilities[top].sum())) < 0.05


def test_features_are_the_streams_that_enter_the_layers(folder, target):
    ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    plain, entered = load_stored(folder, attention_function("sdpa")), []
    for layer in plain.layers:
        layer.register_forward_pre_hook(lambda _, arguments: entered.append(arguments[0]))
    with torch.no_grad():
        hidden, _ = plain(ids, MaskBuilder("sdpa", torch.device("cpu")).build(np.zeros((2, 12), np.int32)))
    features, ours = target.features(ids, (2, 0))
    assert torch.allclose(features, torch.cat((entered[2], entered[0]), -1), atol=1e-4)
    assert torch.allclose(ours, hidden, atol=1e-4)
    last, _ = target.features(ids, (3,))
    assert torch.allclose(plain.norm(last), hidden, atol=1e-4)


def test_prompts_end_where_the_target_goes_on(tmp_path):
    renderer, seen = load_renderer(TINY), set()
    talk = Document("chat", messages=[user("Hi"), assistant("Hello."), user("Bye"), assistant("See you.", "end")])
    prose = Document("novels", text="It was a long way home. " * 200)
    starts = {tuple(prompt_of(talk, renderer, Random(i))) for i in range(20)}
    expected = [renderer.template.encode(renderer.tokenizer, talk.messages[:n], None, thinking=False) for n in (1, 3)]
    assert starts == set(map(tuple, expected))
    held_out = list(cut([talk] * 4 + [prose], renderer, Random(1), {}, 100, seen))
    assert not list(
        cut([talk] * 20, renderer, Random(2), {}, 100, set(seen) | {np.uint16(e).tobytes() for e in expected})
    )
    trained = list(cut([prose] * 3, renderer, Random(3), {"novels": 5}, 100, seen))
    assert len(trained) == 5
    write(tmp_path / "prompts.npz", held_out + trained, len(held_out))
    prompts = Prompts.load(tmp_path / "prompts.npz")
    assert prompts.held_out.sum() == len(held_out) and len(prompts) == len(held_out) + 5
    for i, (source, ids) in enumerate(held_out + trained):
        assert prompts.sources[prompts.source[i]] == source and np.array_equal(prompts.ids(i), ids)
