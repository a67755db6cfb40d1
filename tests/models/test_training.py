"""The tiny checkpoint's training code: packing, fake quantisation, rendering, packed rows, and the model itself."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from models.kimi_k25.training.architecture import Architecture
from models.kimi_k25.training.attention import MaskBuilder, attention_function
from models.kimi_k25.training.corpus import made_documents
from models.kimi_k25.training.dataset import PADDING, TokenData, pack
from models.kimi_k25.training.documents import Document, assistant, user
from models.kimi_k25.training.evaluate import held_out_losses, targets_of
from models.kimi_k25.training.everyday_tools import EVERYDAY
from models.kimi_k25.training.export import checkpoint_tensors, export
from models.kimi_k25.training.generation import greedy
from models.kimi_k25.training.made_chat import memory_chat, small_exchange
from models.kimi_k25.training.made_sums import addition_steps, subtraction_steps
from models.kimi_k25.training.made_tools import tool_conversation, tool_questions
from models.kimi_k25.training.model import TinyKimi, token_losses
from models.kimi_k25.training.prepare import load_renderer, tokenize
from models.kimi_k25.training.quantization import (
    dequantize,
    fake_quantize,
    group_scales,
    pack_int4,
    quantize,
    unpack_int4,
)
from models.kimi_k25.training.synthetic_tools import PLAIN
from models.kimi_k25.training.tool_accuracy import called_tools, grade, tool_accuracy
from models.kimi_k25.training.train import TINY
from models.kimi_k25.training.trainer import Settings, Trainer
from tests.small_target import SMALL


@pytest.fixture(scope="module")
def renderer():
    return load_renderer(TINY)


@pytest.fixture(scope="module")
def small_model() -> TinyKimi:
    model = TinyKimi(SMALL, attention_function("sdpa"))
    model.initialise(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
            if "lm_head" in name or "embed" in name:
                weight.mul_(10)
        for moe in model.moe_layers():
            moe.correction_bias.copy_(torch.randn(SMALL.n_routed_experts, generator=generator) * 0.05)
    return model.eval()


def test_pack_known_word():
    row = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]])
    assert pack_int4(row).item() & 0xFFFFFFFF == 0xFEA98710


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_pack_round_trip(rows, words, seed):
    integers = torch.randint(-8, 8, (rows, 8 * words), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(unpack_int4(pack_int4(integers)), integers)


def test_pack_equals_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    integers = torch.randint(-8, 8, (48, 256), generator=torch.Generator().manual_seed(0))
    theirs = helpers.pack_to_int32(integers.to(torch.int8), num_bits=4)
    assert torch.equal(pack_int4(integers), theirs)
    assert torch.equal(unpack_int4(theirs), integers)


def test_fake_quantisation_equals_the_packed_weights():
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(1)) * 0.07
    weight[0, :32] = 0.0
    weight[1, 3] = 4.0
    scale = group_scales(weight)
    stored = dequantize(unpack_int4(pack_int4(quantize(weight, scale))), scale)
    simulated = fake_quantize(weight, torch.tensor(1.0)).to(torch.bfloat16)
    assert torch.equal(simulated, stored)
    assert torch.equal(fake_quantize(weight, torch.tensor(0.0)), weight)


def test_fake_quantisation_passes_the_gradient():
    weight = torch.randn(4, 64, requires_grad=True)
    fake_quantize(weight, torch.tensor(1.0)).sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def _dequantised_for_transformers(model: TinyKimi) -> dict[str, torch.Tensor]:
    stored = {name.removeprefix("language_model."): t for name, t in checkpoint_tensors(model).items()}
    weights = {name: t.float() for name, t in stored.items() if ".experts." not in name}
    for name, words in stored.items():
        if name.endswith("weight_packed"):
            base = name.removesuffix("_packed")
            weights[base] = dequantize(unpack_int4(words), stored[base + "_scale"]).float()
            assert stored[base + "_shape"].tolist() == list(weights[base].shape)
    return weights


def test_logits_equal_transformers_on_the_export(small_model, tmp_path):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    text_config = SMALL.text_config()
    text_config.pop("quantization_config")
    text_config.pop("model_type")
    config = DeepseekV3Config(**text_config, attn_implementation="eager")
    reference = DeepseekV3ForCausalLM(config).eval()
    weights = _dequantised_for_transformers(small_model)
    for name in [n for n in weights if ".experts.0.gate_proj" in n]:
        base = name.split("experts.")[0] + "experts."
        parts = {p: [weights.pop(f"{base}{e}.{p}_proj.weight") for e in range(8)] for p in ("gate", "up", "down")}
        weights[base + "gate_up_proj"] = torch.cat((torch.stack(parts["gate"]), torch.stack(parts["up"])), 1)
        weights[base + "down_proj"] = torch.stack(parts["down"])
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    ids = torch.randint(0, SMALL.vocab_size, (2, 40), generator=torch.Generator().manual_seed(5))
    ours = _with_stored_weights(small_model)
    with torch.no_grad():
        hidden, _ = ours(ids, MaskBuilder("sdpa", torch.device("cpu")).build(np.zeros((2, 40), np.int32)))
        logits = hidden @ ours.lm_head.weight.t()
        expected = reference(ids).logits
    assert expected.std() > 0.5
    assert (logits - expected).abs().max() < 1e-4


def _with_stored_weights(model: TinyKimi) -> TinyKimi:
    """The model as the checkpoint holds it: BF16 values, experts through INT4."""
    copy = TinyKimi(SMALL, attention_function("sdpa")).eval()
    state = {n: t if "correction_bias" in n else t.to(torch.bfloat16).float() for n, t in model.state_dict().items()}
    state |= {n: t for n, t in model.state_dict().items() if ".experts_" in n}
    copy.load_state_dict(state)
    copy.int4.fill_(1.0)
    return copy


def test_documents_in_one_row_do_not_see_each_other(small_model):
    ids = torch.randint(0, SMALL.vocab_size, (1, 30), generator=torch.Generator().manual_seed(6))
    masks = MaskBuilder("sdpa", torch.device("cpu"))
    together = np.repeat([[1, 2]], 15, axis=1)
    with torch.no_grad():
        packed, _ = small_model(ids, masks.build(together))
        alone, _ = small_model(ids[:, 15:], masks.build(np.zeros((1, 15), np.int32)))
    assert torch.allclose(packed[:, 15:], alone, atol=1e-4)


def test_export_layout(small_model, tmp_path):
    export(small_model, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-000002.safetensors" for i in (1, 2)]
    tensors = {}
    for file in set(index["weight_map"].values()):
        tensors |= load_file(tmp_path / file)
    assert set(tensors) == set(index["weight_map"])
    prefix = "language_model.model.layers.1.mlp."
    packed = tensors[prefix + "experts.7.down_proj.weight_packed"]
    assert packed.dtype == torch.int32 and packed.shape == (64, 4)
    assert tensors[prefix + "experts.7.down_proj.weight_scale"].dtype == torch.bfloat16
    assert tensors[prefix + "experts.7.down_proj.weight_shape"].tolist() == [64, 32]
    assert tensors[prefix + "gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors[prefix + "gate.weight"].dtype == torch.bfloat16
    assert tensors["language_model.lm_head.weight"].shape == (320, 64)


def test_training_lowers_the_loss():
    model = TinyKimi(replace(SMALL, num_hidden_layers=2), attention_function("sdpa"))
    model.initialise(0)
    ids = torch.arange(64).repeat(4, 1) % 7
    mask = MaskBuilder("sdpa", torch.device("cpu")).build(np.zeros((4, 64), np.int32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        hidden, loads = model(ids[:, :-1], mask[..., :-1, :-1])
        loss = token_losses(hidden, model.lm_head.weight, ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.balance(loads, 1e-3)
        losses.append(loss.item())
    assert losses[0] > 5 and losses[-1] < 1
    assert sum(float(load.sum()) for load in loads) == 4 * 63 * SMALL.num_experts_per_tok


@pytest.mark.parametrize("thinking", [True, False])
def test_training_text_continues_what_the_server_sends(renderer, thinking):
    rng = Random(7)
    documents = []
    while len(documents) < 12:
        made = memory_chat(rng) if rng.random() < 0.5 else tool_conversation(rng, small_exchange)
        if made.thinking is thinking:
            documents.append(made)
    for document in documents:
        ids, answer = renderer.encode(document)
        sent = renderer.template.encode(renderer.tokenizer, document.messages[:-1], document.tools, thinking=thinking)
        assert ids[: len(sent)] == sent
        assert not answer[len(sent) - 1] and all(answer[len(sent) :])
        last = document.messages[-1]
        expected = last["content"] + "<|im_end|>"
        if thinking:
            assert last["reasoning_content"]
            expected = f"{last['reasoning_content']}</think>{expected}"
        assert renderer.tokenizer.decode(ids[len(sent) :], skip_special_tokens=False) == expected
        assert ids[-1] == renderer.tokenizer.im_end_id


def test_tool_loop_is_rendered_as_the_engine_parses_it(renderer):
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    document = Document(
        "tools",
        messages=[
            user("Weather in Oslo?"),
            assistant("", "need tool")
            | {"tool_calls": [{"id": "functions.get_weather:0", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "4 C"},
            assistant("It is 4 degrees.", "done"),
        ],
        tools=[EVERYDAY["get_weather"]],
        thinking=True,
    )
    text = renderer.text(document)
    assert text.startswith("<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n")
    assert "<think>need tool</think><|tool_calls_section_begin|>" in text
    assert text.endswith("<think>done</think>It is 4 degrees.<|im_end|>")
    assert called_tools(text) == [("get_weather", {"city": "Oslo"})]
    ids, answer = renderer.encode(document)
    written = renderer.tokenizer.decode([i for i, a in zip(ids, answer, strict=True) if a], skip_special_tokens=False)
    assert written.startswith("need tool</think><|tool_calls_section_begin|>")
    assert "Weather in Oslo" not in written and "4 C" not in written


def test_every_digit_is_a_token(renderer):
    ids = renderer.tokenizer.encode("2026 and 17+25=42")
    digits = [renderer.tokenizer.decode([i]) for i in ids if renderer.tokenizer.decode([i]).isdigit()]
    assert "".join(digits) == "2026172542" and all(len(d) == 1 for d in digits)


@given(st.integers(0, 99999), st.integers(0, 99999))
@settings(max_examples=200, deadline=None)
def test_written_out_sums_are_right(a, b):
    for steps, value in ((addition_steps(a, b), a + b), (subtraction_steps(a, b), a - b)):
        assert steps.rstrip(".").endswith(str(value))
        for claim in steps.split(". "):
            if "=" in claim and ":" in claim:
                left, right = claim.split(": ")[1].split(" = ")
                assert sum_of(left) == int(right.split(",")[0].rstrip("."))


def sum_of(expression: str) -> int:
    total, sign = 0, 1
    for part in expression.split():
        if part in "+-":
            sign = 1 if part == "+" else -1
        else:
            total += sign * int(part)
    return total


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_packing_keeps_every_document_whole(lengths, seed):
    rng = np.random.default_rng(seed)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    tokens = rng.integers(0, 5000, starts[-1]).astype(np.uint16)
    data = TokenData(tokens, rng.random(starts[-1]) < 0.5, starts, np.zeros(len(lengths), np.uint8), ["x"])
    rows = pack(data, rng.permutation(len(lengths)), 64, pad_id=7)
    assert (rows.documents != PADDING).sum() == starts[-1]
    for i in range(len(lengths)):
        row, column = np.nonzero(rows.documents == i)
        assert len(set(row)) == 1 and (np.diff(column) == 1).all()
        assert (rows.tokens[row, column] == tokens[starts[i] : starts[i + 1]]).all()
        assert (rows.answer[row, column] == data.answer[starts[i] : starts[i + 1]]).all()


def test_targets_stay_within_documents_and_skip_given_tokens():
    data = TokenData(
        np.array([5, 8, 9, 3, 4, 8, 6], np.uint16), np.zeros(7, bool), np.array([0, 4, 7]), np.zeros(2, np.uint8), ["x"]
    )
    rows = pack(data, np.array([0, 1]), 8, pad_id=0)
    targets = targets_of(rows, opened=(8, 9))
    assert targets[0].tolist() == [8, -100, 3, -100, 8, 6, -100, -100]


def test_token_data_survives_the_disk(renderer, tmp_path):
    made = made_documents(_OnlyTools(), "tools", 20, seed=1)
    documents = [*made, Document("prose", text="Some words. " * 900)]
    data = tokenize(documents, renderer)
    data.save(tmp_path / "t.xz")
    loaded = TokenData.load(tmp_path / "t.xz")
    for name in ("tokens", "answer", "starts", "source"):
        assert np.array_equal(getattr(data, name), getattr(loaded, name))
    assert loaded.sources == ["prose", "tools"]
    assert (np.diff(loaded.starts) <= 1024).all()
    assert len(loaded.chat_documents()) == (loaded.source == 1).sum()


def test_trainer_goes_through_its_stages_and_is_measured():
    pattern = np.tile(np.arange(10, 30, dtype=np.uint16), 200)
    answer = np.tile(np.arange(20) >= 10, 200)
    answer[2000:] = False
    starts = np.arange(0, 4001, 40)
    source = (starts[:-1] >= 2000).astype(np.uint8)
    data = TokenData(pattern, answer, starts, source, ["chat", "prose"])
    chosen = Settings(60, rows=4, row_length=128, learning_rate=1e-2, dropout=0.1, compile=False, seed=0)
    trainer = Trainer(SMALL, chosen, data, torch.device("cpu"), "sdpa", log=lambda line: None)
    before = held_out_losses(trainer.evaluation_model(), data, 128, False, torch.device("cpu"))
    for progress in (0.1,) * 20 + (0.82,) * 3:
        trainer.step(progress)
    assert trainer.model.int4.item() == 1.0 and trainer.model.drop.item() == 0.0
    trainer.step(0.9)
    _, targets, _ = trainer._on_device(next(trainer._batches))
    assert set(targets[targets != -100].tolist()) == set(range(20, 30))
    after = held_out_losses(trainer.evaluation_model(), data, 128, True, torch.device("cpu"))
    assert after["all"] < before["all"] - 2 and set(after) == {"chat", "prose", "answers", "all"}
    prompt = pattern[:30].astype(int).tolist()
    written = greedy(trainer.evaluation_model(), [prompt, prompt[:25]], {29}, 6, torch.device("cpu"))
    assert written[1] == greedy(trainer.evaluation_model(), [prompt[:25]], {29}, 6, torch.device("cpu"))[0]
    assert all(len(w) == 6 or w[-1] == 29 for w in written)


class _OnlyTools:
    def document(self, source: str, rng: Random) -> Document:
        return tool_conversation(rng, small_exchange)


def test_made_documents_depend_on_the_seed_alone():
    first, again, other = ([d.to_json() for d in made_documents(_OnlyTools(), "tools", 30, seed)] for seed in (1, 1, 2))
    assert first == again and not set(first) & set(other)


def test_tool_questions_name_unseen_tools_and_are_graded_exactly():
    first = tool_questions(40, 1, PLAIN, set())
    seen = {tool["function"]["name"] for question in first for tool in question["tools"]}
    for question in tool_questions(40, 1, PLAIN, seen):
        names = [tool["function"]["name"] for tool in question["tools"]]
        assert names.count(question["name"]) == 1 and not set(names) & seen

    def call(name: str, arguments: str) -> str:
        return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"

    assert grade("ok</think>" + call("a.b", '{"y": 2, "x": 1}'), "a.b", {"x": 1, "y": 2}) == (True, True)
    assert grade(call("a.b", '{"x": "1"}'), "a.b", {"x": 1}) == (True, False)
    assert grade(call("a.b", '{"x": 1'), "a.b", {"x": 1}) == (True, False)
    assert grade(call("b", "{}"), "a.b", {}) == grade("", "a.b", {}) == (False, False)
    assert grade(call("b", "{}") * 2, "b", {}) == (False, False)


def test_tool_accuracy_of_an_untrained_model_is_zero(renderer):
    model = TinyKimi(replace(SMALL, vocab_size=Architecture().vocab_size), attention_function("sdpa")).eval()
    model.initialise(0)
    shares = tool_accuracy(model, renderer, tool_questions(2, 2, PLAIN, set()), torch.device("cpu"))
    assert shares == {mode: {"name": 0.0, "call": 0.0} for mode in ("thinking", "instant")}
