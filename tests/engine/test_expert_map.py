"""Placing experts by a file: the same answers, other ranks at work; a file that makes no sense stops the start."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from engine.agreement import settings_difference
from engine.comm.dispatcher import DISPATCHERS
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError, EngineConfig
from engine.core import EngineCore
from engine.expert_map import ExpertMap, read
from engine.launch import start_engine
from engine.layers.parameter import reordered, spec
from engine.layers.quant import FloatExperts
from engine.sampling_params import SamplingParams
from serve import parse_arguments
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint, scaled
from tests.rank_cores import build_core, run_ranks

SHAPE = scaled(SMALL, num_hidden_layers=3)
EXPERTS = SHAPE.n_routed_experts
REVERSED = list(range(EXPERTS))[::-1]
SHUFFLED = random.Random(5).sample(range(EXPERTS), EXPERTS)
PLACED = {"layers": {"1": REVERSED, "2": SHUFFLED}}
PROMPT = list(range(40))
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=4, prompt_logprobs=4)


@pytest.fixture(scope="module", params=["int4", "bf16"])
def checkpoint(request, tmp_path_factory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("map"), SHAPE, quant=request.param)


def settings(directory: Path, **more) -> EngineConfig:
    return EngineConfig(str(directory), device="cpu", dtype="float32", num_threads=1, max_model_len=64, **more)


def answer_of(core: EngineCore) -> dict:
    """Tokens, the log-probabilities of everything scored, and where tokens went."""
    (answer,) = ask(core, (PROMPT, PARAMS))
    rows = [*answer.prompt_logprobs[1:], *answer.logprobs]
    scores = {f"{at} {token}": entry.logprob for at, row in enumerate(rows) for token, entry in row.items()}
    return {"tokens": answer.token_ids, "scores": scores, "load": asdict(core.expert_load())}


def assert_same(answer: dict, expected: dict) -> None:
    assert answer["tokens"] == expected["tokens"]
    both = answer["scores"].keys() & expected["scores"].keys()
    assert len(both) > 4 * len(PROMPT)
    assert all(abs(answer["scores"][at] - expected["scores"][at]) < 1e-4 for at in both)
    assert answer["load"]["layers"] == expected["load"]["layers"], "counts are of logical experts"


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict:
    return answer_of(build_core(settings(checkpoint)))


@pytest.mark.parametrize("placed", [REVERSED, PLACED, {"layers": {"2": SHUFFLED}}, list(range(EXPERTS))])
def test_one_rank_answers_the_same(checkpoint, expected, placed):
    assert_same(answer_of(build_core(settings(checkpoint, expert_map=placed))), expected)


def answers_of_all(rank: int, directory: str, placed) -> dict[str, dict]:
    found = {}
    for name in DISPATCHERS:
        try:
            core = build_core(settings(Path(directory), tp=2, ep=2, moe_comm=name, expert_map=placed), rank)
        except ValueError:
            continue
        found[name] = answer_of(core)
    return found


def test_two_ranks_answer_the_same_and_hold_what_the_map_says(checkpoint, expected, tmp_path):
    half = EXPERTS // 2
    shares = []
    for slots, counts in zip((REVERSED, SHUFFLED), expected["load"]["layers"], strict=True):
        shares.append([sum(counts[expert] for expert in part) / sum(counts) for part in (slots[:half], slots[half:])])
    for found in run_ranks(2, tmp_path, answers_of_all, str(checkpoint), PLACED):
        assert set(found) >= {"reference", "allreduce", "nccl_a2a"}
        for name, answer in found.items():
            assert_same(answer, expected)
            assert answer["load"]["ranks"] == [pytest.approx(each) for each in shares], name
    plain = [sum(counts[:half]) / sum(counts) for counts in expected["load"]["layers"]]
    assert all(abs(before - after[0]) > 0.01 for before, after in zip(plain, shares, strict=True)), "the load moved"


def test_each_slot_holds_its_expert():
    """On the second of two ranks: slots 2 and 3 of four hold experts 0 and 1."""
    experts = FloatExperts(4, 8, 4, ParallelState(rank=1, tp=2, ep=2), torch.float32)
    specs = experts.specs("", (2, 3, 0, 1))
    assert [name for name, one in specs.items() if one.part is not None and "down" in name] == [
        "0.down_proj.weight", "1.down_proj.weight",
    ]  # fmt: skip
    specs["1.down_proj.weight"].store(torch.ones(8, 4))
    assert float(experts.down[0].sum()) == 0 and float(experts.down[1].sum()) == 32
    assert set(specs) == set(experts.specs("")), "every expert is still checked"
    rows = torch.zeros(3, 2)
    reordered(spec((3, 2), (slice(None), slice(None)), rows), (2, 0, 1)).store(torch.arange(6.0).view(3, 2))
    assert rows.tolist() == [[4, 5], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([0, 1], "2 slots"),
        ([*REVERSED[:-1], 1], "expert 1 twice"),
        ([*range(1, EXPERTS), EXPERTS], f"0 to {EXPERTS - 1}"),
        ([-1, *range(1, EXPERTS)], "expert -1"),
        ([0.0, *range(1, EXPERTS)], "list of expert ids"),
        ([True, *range(1, EXPERTS)], "list of expert ids"),
        ({"layers": {"0": REVERSED}}, "1 to 2"),
        ({"layers": {"3": REVERSED}}, "1 to 2"),
        ({"layers": {"x" * 500: REVERSED}}, "1 to 2"),
        ({"layers": {"1": "no list"}}, "layer 1"),
        ({"layers": {"1": None}}, "layer 1"),
        ({"layers": 5}, "expert_map must be"),
        ({"1": REVERSED}, "expert_map must be"),
        ({"layers": {}, "more": 1}, "expert_map must be"),
    ],
)
def test_a_map_that_does_not_fit_is_refused_before_anything_starts(checkpoint, tmp_path, monkeypatch, value, words):
    monkeypatch.setattr(subprocess, "Popen", _refuse)
    file = tmp_path / "map.json"
    file.write_text(json.dumps(value))
    for given in (str(file), file, value):
        message = refusal(settings(checkpoint, tp=2, ep=2, expert_map=given))
        assert words in message and "\n" not in message and message.endswith(".") and len(message) < 250, message


def _refuse(*_arguments, **_options):
    raise AssertionError("a rank was started")


def refusal(config: EngineConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        start_engine(config)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 10000, "5", '"map.json"', "null", "\xff\xfe"])
def test_a_file_that_holds_no_map_is_refused(checkpoint, tmp_path, text):
    file = tmp_path / "map.json"
    file.write_bytes(text.encode("latin-1"))
    message = refusal(settings(checkpoint, expert_map=str(file)))
    assert str(file) in message and "\n" not in message
    assert "is no file" in refusal(settings(checkpoint, expert_map=str(tmp_path / "absent")))
    assert "is no file" in refusal(settings(checkpoint, expert_map=str(tmp_path)))


def test_made_up_weights_have_no_experts_to_place(checkpoint):
    with pytest.raises(ConfigError, match="made-up"):
        settings(checkpoint, load_format="dummy", expert_map=REVERSED)
    with pytest.raises(ConfigError, match="expert_map"):
        settings(checkpoint, expert_map=5)
    with pytest.raises(ConfigError, match="expert_load"):
        settings(checkpoint, expert_load=1)


def test_ranks_compare_what_the_file_says(tmp_path):
    """Not its name: the same path may hold something else on another host."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps(list(range(384))))
    same = [EngineConfig("m", expert_map=read(str(file))) for file in files]
    assert settings_difference(same[0], same[1], 1) == ""
    other = EngineConfig("m", expert_map=[1, 0, *range(2, 384)])
    message = settings_difference(other, same[0], 1)
    assert message.startswith("rank 1 was started with expert_map=sha256:") and len(message) < 200
    assert message.count("sha256:") == 2 and len(set(message.split("sha256:"))) == 3
    assert EngineConfig.from_json(other.to_json()) == other


def test_flags():
    arguments = parse_arguments(["--expert-map", "m.json", "--no-expert-load"])
    assert arguments.expert_map == "m.json" and arguments.expert_load is False
    assert parse_arguments([]).expert_load is True and parse_arguments([]).expert_map is None


def test_no_map_is_the_identity():
    assert ExpertMap().of_layer(3) is None


def test_a_layer_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "map.json"
    file.write_text('{"layers": {"1": [1, 0], "1": [0, 1]}}')
    with pytest.raises(ConfigError, match="'1' stands there twice"):
        read(str(file))
