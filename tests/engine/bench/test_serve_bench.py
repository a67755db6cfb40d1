"""`engine.bench serve` from end to end on the tiny model: both arms, both loops, and what the result file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.bench import serve
from engine.bench.__main__ import main, parser
from engine.bench.serve_options import PRESETS, fill_in, points_of
from tests.shares import config_directory

SMALL = ["--prompt-tokens", "20", "--output-tokens", "4", "--max-model-len", "512"]


def measured(tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "result.json"
    assert main(["serve", "--device", "cpu", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_http_against_in_process(tmp_path, capsys):
    result = measured(tmp_path, *SMALL, "--clients", "1,3", "--rounds", "2")
    assert [(r["load"], r["arm"]) for r in result["rows"]] == [
        (load, arm) for load in ("1 client", "3 clients") for arm in ("in-process", "http")
    ]
    assert [r["requests"] for r in result["rows"]] == [1, 1, 3, 3]
    assert all(r["errors"] == r["429"] == 0 and r["tok/s"] > 0 and r["TTFT p50"] > 0 for r in result["rows"])
    for point, ratio in zip(("1 client", "3 clients"), result["http_over_in_process"], strict=True):
        inside, http = ([f["tok/s"] for f in s["rounds"]] for s in result["samples"] if s["load"] == point)
        ratios = sorted(b / a for a, b in zip(inside, http, strict=True))
        assert ratio["HTTP / in process"] == pytest.approx(sum(ratios) / 2)
        assert (ratio["lowest"], ratio["highest"]) == pytest.approx((ratios[0], ratios[1]))
    assert result["http_over_in_process"][0]["goal"] == 0.98 and result["http_over_in_process"][1]["goal"] is None
    assert all(f["output_tokens"] == 4 * f["requests"] for s in result["samples"] for f in s["rounds"])
    assert "HTTP / in process" in capsys.readouterr().out and "Protocol" in result["http"]


def test_agents_in_an_open_loop(tmp_path):
    arguments = ["--trace", "agents", "--rate", "50", "--requests", "2", "--turns", "3", "--think", "0.01"]
    arguments += ["--scale", "0.002", "--rounds", "1", "--max-model-len", "512"]
    result = measured(tmp_path, *arguments)
    inside, http = result["rows"]
    assert inside["load"] == "50/s" and inside["requests"] == http["requests"] >= 6
    assert inside["errors"] == http["errors"] == 0
    tokens = [s["rounds"][0]["output_tokens"] for s in result["samples"]]
    prompts = [s["rounds"][0]["prompt_tokens"] for s in result["samples"]]
    assert tokens[0] == tokens[1] and prompts[0] == prompts[1], "both arms answered the same turns"


def test_a_made_up_share_serves_too(tmp_path):
    model = str(config_directory(tmp_path / "model"))
    share = ["--model", model, "--tp-share", "2", "--layers", "2", "--clients", "2", "--rounds", "1", "--host-cost"]
    result = measured(tmp_path, *share, "--prompt-tokens", "20", "--output-tokens", "4", "--max-model-len", "230")
    assert [row["requests"] for row in result["host"]] == [2] and result["host"][0]["schedule"] > 0
    assert result["world"] == {"tp": 2, "ep": 1} and result["layers"] == 2
    assert [r["errors"] for r in result["rows"]] == [0, 0]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_whole(preset):
    args = parser().parse_args(["serve", "--preset", preset, "--rounds", "7"])
    fill_in(args, has_gpu=True)
    assert args.rounds == 7 and args.prompt_tokens >= 1024 and points_of(args)
    assert all(value is not None for name, value in vars(args).items() if name in PRESETS[preset])


def test_the_arm_without_a_prefix_cache_has_an_engine_without_one(monkeypatch):
    made = []
    monkeypatch.setattr(serve, "EngineCore", lambda config, files, runner: made.append(config.enable_prefix_caching))
    from engine.config import EngineConfig

    engine = serve.Engine(EngineConfig(), None, None)
    for arm in ("in-process", "in-process-uncached", "http-uncached"):
        engine.core(arm)
    assert made == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "smoke"], "--arms 'smoke'"),
        (["--clients", "0"], "--clients"),
        (["--rate", "x"], "--rate"),
        (["--rounds", "0"], "--rounds"),
        (["--share", "1.5"], "--share"),
        (["--requests", "0"], "--requests"),
        (["--scale", "0"], "--scale"),
        (["--layers", "2"], "--layers"),
        (["--think", "-1"], "--think"),
        (["--prompt-tokens", "5000", "--clients", "1"], "longer than the engine's 4096 tokens"),
        (["--trace", "agents", "--scale", "1"], "longer than the engine's 4096 tokens"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(capsys, arguments, words):
    assert main(["serve", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err
