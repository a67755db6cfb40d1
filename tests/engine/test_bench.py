"""The measurements measure what they say: equal work in both arms, honest sums, and a file that scripts can read."""

from __future__ import annotations

import json

import pytest
import torch

from engine.bench import report, transformers_arm
from engine.bench.__main__ import SUBCOMMANDS, main, parser
from tests import oracle
from tests.checkpoints import SHAPES, SMALL, build_checkpoint


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_cpu_compares_both_arms_on_the_same_tokens(tmp_path, capsys, threads):
    model = build_checkpoint(tmp_path / "model", SMALL, vision=True, shards=2)
    file = tmp_path / "cpu.json"
    arguments = ["cpu", "--model", str(model), "--tokens", "6", "--rounds", "3", "--threads", "1", "--json", str(file)]
    assert main(arguments) == 0
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m engine.bench cpu --model")
    assert result["date"] and result["device"] and result["versions"]["torch"] == torch.__version__
    assert result["threads"] == 1 and result["transformers_settings"]["attention"] == "sdpa"
    assert [(r["num_prompts"], r["goal"]) for r in result["results"]] == [(8, 2.0), (1, 1.5)]
    for row in result["results"]:
        ours, theirs = row["tokens_per_second"]["engine"], row["tokens_per_second"]["transformers"]
        assert row["ratio"] == pytest.approx(ours["median"] / theirs["median"])
        assert row["reached"] == (row["ratio"] >= row["goal"])
        assert len(ours["samples"]) == len(theirs["samples"]) == 3
        assert row["first_difference"] == [None] * row["num_prompts"], "the two arms did not do the same work"
    printed = capsys.readouterr().out
    assert "transformers tok/s" in printed and "8 of 8" in printed and "1 of 1" in printed


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_the_transformers_arm_is_the_oracle(tmp_path, shape):
    """Its own dequantisation and left padding change nothing: tokens and weights are those of the test oracle."""
    model = build_checkpoint(tmp_path, shape, vision=True, shards=2)
    prompts = oracle.prompts()[1:4]
    arm = transformers_arm.TransformersArm(model, prompts, 8)
    expected = oracle.deepseek_v3(model)
    assert all(torch.equal(a, b) for a, b in zip(arm.model.parameters(), expected.parameters(), strict=True))
    assert arm.run(3) > 0
    assert arm.tokens == oracle.greedy(expected, prompts, 8)


@pytest.mark.parametrize(("flag", "value"), [("--tokens", "0"), ("--rounds", "-1"), ("--threads", "0")])
def test_a_setting_that_measures_nothing_is_refused(flag, value, capsys):
    assert main(["cpu", flag, value]) == 2
    assert flag in capsys.readouterr().err


def test_every_subcommand_of_the_table_has_help(capsys):
    for name in SUBCOMMANDS:
        with pytest.raises(SystemExit) as done:
            parser().parse_args([name, "--help"])
        assert done.value.code == 0 and "--json" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["no-such-measurement"])
    error = capsys.readouterr().err
    assert done.value.code != 0 and all(name in error for name in SUBCOMMANDS)


def test_medians_spread_and_turns():
    order = []

    def arm(name: str, values: list[float]):
        def sample() -> float:
            order.append(name)
            return values.pop(0)

        return sample

    result = report.interleave({"a": arm("a", [4.0, 2.0, 3.0]), "b": arm("b", [10.0, 10.0, 10.0])}, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (result["a"].median, result["a"].spread) == (3.0, pytest.approx(2 / 3))
    assert (result["b"].median, result["b"].spread) == (10.0, 0.0)
    for bad in ([], [1.0, 0.0]):
        with pytest.raises(ValueError, match="samples above zero"):
            report.summarise(bad)


def test_the_table_lines_up():
    rows = [{"name": "a", "tok/s": 1234.5, "ok": True}, {"name": "longer", "tok/s": 0.12345, "ok": None}]
    lines = report.format_table(rows).splitlines()
    assert lines[0].split() == ["name", "tok/s", "ok"] and lines[2].split() == ["a", "1234", "yes"]
    assert lines[3].split() == ["longer", "0.123", "-"]
    assert len({line.index(x) + len(x) for line, x in zip(lines[2:], ("1234", "0.123"), strict=True)}) == 1
