"""`engine.bench spec --texts`: both arms decode the same, and what is counted is what was verified."""

from __future__ import annotations

import json

import pytest
import torch

from engine.bench import spec_text
from engine.bench.__main__ import main
from engine.bench.spec_text import Decoded, accept_length, goal_of, read_prompts
from engine.config import ConfigError
from engine.sampling_params import SamplingParams
from tests.answers import ask
from tests.checkpoints import SMALL, build_checkpoint
from tests.drafts import DraftShape, write_draft
from tests.scripted_drafts import build, right, teach, wrong


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def write(path, sources) -> str:
    path.write_text(json.dumps({"sources": sources}))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("spec_text") / "model", SMALL)


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    shape = DraftShape("llama", SMALL.hidden_size, SMALL.vocab_size, 64, num_heads=4, num_kv_heads=2, head_dim=16)
    return write_draft(tmp_path_factory.mktemp("spec_text") / "draft", shape, layer_ids=(0, 1, 2))


def test_both_arms_say_the_same_and_the_file_says_what_was_measured(tmp_path, capsys, model, draft):
    texts = write(tmp_path / "texts.json", {"tools": [[5, 6, 7], [8]], "chat": [[9] * 20]})
    arguments = ["spec", "--texts", texts, "--model", str(model), "--draft", str(draft), "--device", "cpu"]
    arguments += ["--num-threads", "1", "--tokens", "6", "--rounds", "2", "--batches", "1,3", "--most-guesses", "2"]
    file = tmp_path / "spec.json"
    assert main([*arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [(r["text"], r["batch"]) for r in result["rows"]] == [("tools", 1), ("chat", 1), ("tools", 3), ("chat", 3)]
    for row in result["rows"]:
        assert row["different"] == 0 and row["steps"] <= 1
        assert row["ratio"] == pytest.approx(row["draft tok/s"] / row["plain tok/s"])
        assert row["reached"] == (row["ratio"] >= row["goal"])
    for row in result["accept_lengths"]:
        assert row["different"] == 0 and 1 <= row["k=1"] <= 2 and 1 <= row["k=2"] <= 3
    assert str(tmp_path) not in json.dumps({**result, "command": ""})
    assert "goal at 3" in capsys.readouterr().out


def test_accept_lengths_are_those_of_what_was_verified(model):
    requests = [([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True))]
    expected = ask(build(model, None), *requests)
    for script, length in ((right, 5.0), (wrong, 1.0)):
        core = build(model, 4)
        teach(core, requests, expected, script)
        found, decoded = accept_length(core, [[5, 6, 7]], 11)
        assert (found, decoded.answers) == (length, [expected[0].token_ids])


def test_goals_are_those_of_the_issue():
    assert [goal_of(source, 1) for source in ("tools", "json", "chat", "prose")] == [1.3, 1.3, 0.97, 0.97]
    assert [goal_of("tools", batch) for batch in (4, 16, 64)] == [0.97, 0.99, 0.99]


def test_sums_of_runs():
    one, two = Decoded([[1, 2]], 1.0, 0.5, 2.0, 1, 2), Decoded([[3, 4, 5]], 3.0, 1.5, 4.0, 2, 3)
    both = Decoded.sum([one, two])
    assert both == Decoded([[1, 2], [3, 4, 5]], 4.0, 2.0, 6.0, 3, 5)
    assert (both.rate, both.num_tokens) == (0.75, 5)


def test_bundled_prompts_fit_the_bundled_model():
    prompts = read_prompts(spec_text.PROMPTS, 99)
    assert {"tools", "json", "chat", "small_talk", "sums", "stories", "definitions", "prose"} == set(prompts)
    for group in prompts.values():
        assert 12 <= len(group) <= 20 and all(0 <= t < 4096 for ids in group for t in ids)
    assert spec_text.PROMPTS.stat().st_size < 80_000


@pytest.mark.parametrize(
    "content", ["", "[]", '{"sources": {}}', '{"sources": {"a": []}}', '{"sources": {"a": ["b"]}}']
)
def test_files_without_prompts_are_refused(tmp_path, content):
    file = tmp_path / "texts.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--texts"):
        read_prompts(file, 3)


@pytest.mark.parametrize(
    ("flag", "value"), [("--tokens", "1"), ("--rounds", "0"), ("--prompts", "0"), ("--batches", "0")]
)
def test_a_setting_that_measures_nothing_is_refused(flag, value, capsys):
    assert main(["spec", "--texts", flag, value]) == 2
    assert flag in capsys.readouterr().err
