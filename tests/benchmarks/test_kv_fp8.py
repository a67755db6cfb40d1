"""The script that says what an FP8 cache costs: its sums, and a short run from end to end."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import kv_fp8


def test_scores_of_two_models():
    plain, ours = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log(), torch.tensor([[0.25, 0.5, 0.25]] * 2).log()
    found = kv_fp8.compare(plain, ours, [7, 0, 1])
    assert found["plain"].exp().tolist() == pytest.approx([0.5, 0.8]) and found["fp8"].exp().tolist() == [0.25, 0.5]
    assert float(found["kl"][0]) == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found["same"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("one", "other", "common"), [([1, 2], [1, 2], 2), ([1, 2], [1, 3, 4], 1), ([], [1], 0)])
def test_tokens_up_to_the_first_that_differs(one, other, common):
    assert kv_fp8._common(one, other) == common


def test_a_short_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv_fp8, "KEYS", 128)
    file = tmp_path / "result.json"
    assert kv_fp8.main(["--prompts", "1", "--tokens", "4", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    texts, rows = result["texts"], result["attention"]
    assert texts["prompts"] == 8 and texts["tokens"] > 100
    assert texts["perplexity ratio"] == pytest.approx(1, abs=0.05) and 0 < texts["mean KL"] < 0.05
    assert [row["latents"] for row in rows] == [f"trained, layer {i}" for i in range(5)] + list(kv_fp8.MADE_UP)
    for row in rows:
        assert row["plain cache"] < 1e-5 and 1e-3 < row["fp8 cache"] < 0.1
        assert row["fp8 cache"] == pytest.approx(row["scale of a row, power of two"], rel=0.1)
    assert "perplexity" in capsys.readouterr().out and result["command"].startswith("python benchmarks/kv_fp8.py")
